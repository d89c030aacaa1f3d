"""The user's input: the model, its training, the cluster, and the job that joins them."""

from farpipe.spec.cluster import Cluster, CongestionControl, Device, LocalLink, Site, SiteLink
from farpipe.spec.job import Job, Pins, Request
from farpipe.spec.load import job_of, load_cluster, load_job, load_model, load_table, parse_job
from farpipe.spec.measured import Measured
from farpipe.spec.model import Model, RotaryScaling
from farpipe.spec.presets import preset_device, preset_model, preset_site
from farpipe.spec.prices import Prices
from farpipe.spec.recompute import Recompute, operations_of, possible_operations
from farpipe.spec.training import ContextExchange, Data, Matmul, Precision, Rate, Training, WireType, Zero
from farpipe.spec.uncertainty import Uncertainty, parse_uncertainty

__all__ = [
    "Cluster",
    "CongestionControl",
    "ContextExchange",
    "Data",
    "Device",
    "Job",
    "LocalLink",
    "Matmul",
    "Measured",
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
    "Uncertainty",
    "WireType",
    "Zero",
    "job_of",
    "load_cluster",
    "load_job",
    "load_model",
    "load_table",
    "operations_of",
    "parse_job",
    "parse_uncertainty",
    "possible_operations",
    "preset_device",
    "preset_model",
    "preset_site",
]
