"""Sinks of metrics beside ``metrics.jsonl``: TensorBoard's files, and a port that Prometheus asks."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final, Protocol

from farpipe.core.errors import InputError
from farpipe.core.spec import MetricsSettings
from farpipe.engine.transport.link_events import KINDS

TENSORBOARD_NAME: Final = "tensorboard"
_HINT: Final = "pip install 'farpipe[metrics]'"


_HELP: Final = {
    "step": "Number of the newest step, from 0",
    "attempt": "Number of times that the run was started again",
    "loss": "Training loss, mean per token",
    "evaluation_loss": "Loss on held-out text, mean per token",
    "grad_norm": "Norm of the gradient before clipping",
    "learning_rate": "Learning rate of the step",
    "makespan_s": "From the start of the first action of a step to the end of the last",
    "step_s": "A whole optimizer step on rank 0",
    "pause_s": "Between two steps: evaluation, snapshot of a checkpoint",
    "tokens_per_s": "Tokens trained per second",
    "bubble": "Part of the makespan in which ranks computed nothing, mean over the ranks",
    "model_flops_utilisation": "Model FLOPs utilisation (MFU): the model's FLOPs over what the devices could do",
    "causal_utilisation": "MFU with attention counted as its causal mask leaves it",
    "exposed_inter_site_s": "Waiting for messages between sites, mean over the ranks",
    "exposed_inter_site_max_s": "Waiting for messages between sites, the rank that waits most",
    "exposed_intra_site_s": "Waiting for messages inside sites, mean over the ranks",
    "exposed_intra_site_max_s": "Waiting for messages inside sites, the rank that waits most",
    "link_bytes": "Bytes that a link carried in the step",
    "rss_max_bytes": "Memory of the process that has most",
    "cuda_peak_max_bytes": "Peak memory of the GPU that had most",
}
"""Help texts of the figures for Prometheus."""
_EVENT_LABELS: Final = ("run", "link", "kind")


class Sink(Protocol):
    """Takes every line of metrics."""

    def write(self, line: Mapping[str, Any]) -> None:
        """Show the figures of one step."""

    def close(self) -> None:
        """No more lines."""


@contextmanager
def open_sinks(settings: MetricsSettings, run_dir: Path, first_step: int) -> Iterator[list[Sink]]:
    """Open the sinks of `settings` within the context; InputError if a package is missing or the port is taken."""
    with ExitStack() as stack:
        sinks: list[Sink] = []
        if settings.tensorboard:
            sinks.append(stack.enter_context(closing(TensorBoard(run_dir / TENSORBOARD_NAME, first_step))))
        if settings.prometheus_port is not None:
            server = Prometheus(settings.prometheus_host, settings.prometheus_port, run_dir.resolve().name)
            sinks.append(stack.enter_context(closing(server)))
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
            raise InputError(f"TensorBoard: {error}; {_HINT}") from None
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, line: Mapping[str, Any]) -> None:
        for name, labels, value in figures(line):
            if name not in ("step", "attempt"):
                self._writer.add_scalar("/".join([name, *labels.values()]), value, line["step"])

    def close(self) -> None:
        self._writer.close()


class Prometheus:
    """Serves the newest figures as gauges named ``farpipe_...`` at http://host:port/metrics, with the run as a label.

    Names end in the unit, as Prometheus' rules have it: ``step_s`` is ``farpipe_step_seconds``.
    """

    def __init__(self, host: str, port: int, run: str = "") -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
        except ImportError as error:
            raise InputError(f"Prometheus: {error}; {_HINT}") from None
        self._registry, self._gauge, self._run = CollectorRegistry(), Gauge, run
        self._gauges: dict[str, Gauge] = {}
        self._events = Counter(
            "farpipe_link_events", "Outages, reconnections, retransmissions", _EVENT_LABELS, registry=self._registry
        )
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as error:
            raise InputError(f"Prometheus: {host}:{port} can't be listened on: {error.strerror or error}") from None

    @property
    def port(self) -> int:
        """Port that it listens on; of interest if any free port was asked for."""
        return int(self._server.server_port)

    def write(self, line: Mapping[str, Any]) -> None:
        for name, labels, value in figures(line):
            labels = {"run": self._run, **labels}
            if name not in self._gauges:
                words = _HELP.get(name, f"{name.replace('_', ' ')} of the newest step")
                self._gauges[name] = self._gauge(gauge_name(name), words, list(labels), registry=self._registry)
            self._gauges[name].labels(**labels).set(value)
        for link, kind in product(line.get("link_bytes", ()), KINDS):
            self._events.labels(self._run, link, kind)  # from zero on, else Prometheus misses the first event
        for event in line.get("link_events", ()):
            self._events.labels(self._run, event.get("link", "-"), event["kind"]).inc()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def gauge_name(name: str) -> str:
    """The name that Prometheus has for a figure of ``metrics.jsonl``; see prometheus.io/docs/practices/naming."""
    if name.endswith("_per_s"):
        return f"farpipe_{name.removesuffix('_s')}_second"
    return f"farpipe_{name.removesuffix('_s')}_seconds" if name.endswith("_s") else f"farpipe_{name}"
