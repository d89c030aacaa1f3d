"""The user's input: the model, its training, the cluster, and the job that joins them."""

from farpipe.spec.cluster import Cluster, CongestionControl, Device, LocalLink, Prices, Site, SiteLink, rack_share
from farpipe.spec.job import Job, Pins, Request
from farpipe.spec.load import (
    job_of,
    load_cluster,
    load_job,
    load_model,
    load_table,
    parse_job,
    preset_device,
    preset_model,
    preset_site,
)
from farpipe.spec.lora import Lora, possible_modules
from farpipe.spec.model import Model, RotaryScaling
from farpipe.spec.recompute import Recompute, operations_of, possible_operations, recomputed_of
from farpipe.spec.training import (
    ContextExchange,
    Data,
    Matmul,
    MetricsSettings,
    Precision,
    Rate,
    Training,
    WireType,
    Zero,
)

__all__ = [
    "Cluster",
    "CongestionControl",
    "ContextExchange",
    "Data",
    "Device",
    "Job",
    "LocalLink",
    "Lora",
    "Matmul",
    "MetricsSettings",
    "Model",
    "Pins",
    "Precision",
    "Prices",
    "Rate",
    "Recompute",
    "Request",
    "RotaryScaling",
    "Site",
    "SiteLink",
    "Training",
    "WireType",
    "Zero",
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
    "recomputed_of",
]
