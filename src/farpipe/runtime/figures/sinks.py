"""Where metrics go beside ``metrics.jsonl``: TensorBoard's files, and a port that Prometheus asks."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from farpipe.errors import InputError
from farpipe.runtime.run_spec import MetricsSettings

TENSORBOARD_NAME: Final = "tensorboard"
_REMEDY: Final = "pip install 'farpipe[metrics]'"


class Sink(Protocol):
    """Takes every line of metrics."""

    def write(self, line: Mapping[str, Any]) -> None:
        """Show the figures of one step."""

    def close(self) -> None:
        """No more lines."""


@contextmanager
def open_sinks(settings: MetricsSettings, run_dir: Path, first_step: int) -> Iterator[list[Sink]]:
    """What `settings` ask for, open within the context; InputError when a package is missing or the port is taken."""
    with ExitStack() as stack:
        sinks: list[Sink] = []
        if settings.tensorboard:
            sinks.append(stack.enter_context(closing(TensorBoard(run_dir / TENSORBOARD_NAME, first_step))))
        if settings.prometheus_port is not None:
            sinks.append(stack.enter_context(closing(Prometheus(settings.prometheus_host, settings.prometheus_port))))
        yield sinks


def figures(line: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of every figure in a line; what is null or no number is left out."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from ((name, {"link": link}, float(number)) for link, number in value.items())
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, {}, float(value)


class TensorBoard:
    """Writes event files that ``tensorboard --logdir RUN_DIR`` shows."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Steps from `first_step` on that are in the folder already, of an attempt that broke, are hidden."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError(f"TensorBoard: {error}; {_REMEDY}") from None
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, line: Mapping[str, Any]) -> None:
        """See Sink."""
        for name, labels, value in figures(line):
            if name not in ("step", "attempt"):
                self._writer.add_scalar("/".join([name, *labels.values()]), value, line["step"])

    def close(self) -> None:
        """See Sink."""
        self._writer.close()


class Prometheus:
    """Serves the newest figures as gauges named ``farpipe_...`` at http://host:port/metrics."""

    def __init__(self, host: str, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge, start_http_server
        except ImportError as error:
            raise InputError(f"Prometheus: {error}; {_REMEDY}") from None
        self._registry, self._gauge = CollectorRegistry(), Gauge
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as error:
            raise InputError(f"Prometheus: {host}:{port} can't be listened on: {error.strerror or error}") from None

    @property
    def port(self) -> int:
        """Where it listens; of interest where any free port was asked for."""
        return int(self._server.server_port)

    def write(self, line: Mapping[str, Any]) -> None:
        """See Sink."""
        for name, labels, value in figures(line):
            if name not in self._gauges:
                what = f"{name} of the newest step, as in metrics.jsonl"
                self._gauges[name] = self._gauge(f"farpipe_{name}", what, list(labels), registry=self._registry)
            gauge = self._gauges[name]
            (gauge.labels(**labels) if labels else gauge).set(value)

    def close(self) -> None:
        """See Sink."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
