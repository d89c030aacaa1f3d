"""One of the processes that measure at the same time; started by `farpipe.engine.launch.profile.profile`."""

import os

from farpipe.engine.launch.profile import REQUEST_VARIABLE
from farpipe.engine.launch.reports import leave_result, report_done, report_notice, reporting_errors
from farpipe.engine.processes import end_soon
from farpipe.engine.rendezvous import rendezvous_from_env
from farpipe.engine.stages.profile_request import ProfileRequest, StackTimes
from farpipe.engine.stages.stack_times import ChunkStacks, Stacks
from farpipe.engine.transport import TransportConfig, connect


def main() -> None:
    """Measure at the same time as the other processes and leave the times for the launcher."""
    request = ProfileRequest.from_json(os.environ[REQUEST_VARIABLE], REQUEST_VARIABLE)
    if request.sequences:
        _measure_chunks(request)
        return
    stacks = Stacks(request)
    with connect(
        int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), TransportConfig(), rendezvous_from_env()
    ) as transport:
        transport.exchange("stacks", b"", waiting_for="all processes to measure stacks of layers")
        times, cpu_share = stacks.times()
        transport.exchange("optimizer", b"", waiting_for="all processes to measure the optimizer")
        optimizer_s = stacks.optimizer_s_per_param()
    leave_result(StackTimes(**times, optimizer_s_per_param=optimizer_s, cpu_share=cpu_share).model_dump(mode="json"))


def _measure_chunks(request: ProfileRequest) -> None:
    chunks = ChunkStacks(request)
    with connect(
        int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), TransportConfig(), rendezvous_from_env()
    ) as transport:
        transport.exchange("chunks", b"", waiting_for="all processes to measure chunks")
        times = chunks.times()
    leave_result(times.model_dump(mode="json"))


if __name__ == "__main__":
    with reporting_errors():
        main()
    report_done(0)
    end_soon(0, report_notice)
