"""For all tests."""

import signal

# Background jobs of a shell are started with SIGINT ignored, and pass that on to the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
