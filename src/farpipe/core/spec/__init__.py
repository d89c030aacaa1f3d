"""The user's input: the model, its training, the cluster, and the job that joins them."""

from farpipe.core.spec.cluster import (
    Cluster,
    CongestionControl,
    Device,
    LocalLink,
    Prices,
    Site,
    SiteLink,
    differing_keys,
    rack_share,
    without_flash_attention,
)
from farpipe.core.spec.data import Data
from farpipe.core.spec.job import Job, Pins, Request
from farpipe.core.spec.load import (
    job_of,
    load_cluster,
    load_job,
    load_model,
    load_table,
    parse_job,
    preset_device,
    preset_model,
    preset_site,
    value_of,
)
from farpipe.core.spec.local_steps import OUTER_BLOCK, LocalSteps, OuterWireType
from farpipe.core.spec.lora import Lora, possible_modules
from farpipe.core.spec.model import Model, RotaryScaling
from farpipe.core.spec.recompute import Recompute, operations_of, possible_operations, recomputed_of
from farpipe.core.spec.run_keys import MetricsSettings, RunKeys
from farpipe.core.spec.training import ContextExchange, Matmul, Precision, Rate, Training, WireType, Zero, rate_name

__all__ = [
    "OUTER_BLOCK",
    "Cluster",
    "CongestionControl",
    "ContextExchange",
    "Data",
    "Device",
    "Job",
    "LocalLink",
    "LocalSteps",
    "Lora",
    "Matmul",
    "MetricsSettings",
    "Model",
    "OuterWireType",
    "Pins",
    "Precision",
    "Prices",
    "Rate",
    "Recompute",
    "Request",
    "RotaryScaling",
    "RunKeys",
    "Site",
    "SiteLink",
    "Training",
    "WireType",
    "Zero",
    "differing_keys",
    "job_of",
    "load_cluster",
    "load_job",
    "load_model",
    "load_table",
    "operations_of",
    "parse_job",
    "possible_modules",
    "possible_operations",
    "preset_device",
    "preset_model",
    "preset_site",
    "rack_share",
    "rate_name",
    "recomputed_of",
    "value_of",
    "without_flash_attention",
]
