"""Facts that everyone looks up: devices, models, links, modes of transceivers; each row with its source and date."""

from farpipe.core.catalog.rows import (
    DeviceRow,
    LinkRow,
    ModelRow,
    ModeRow,
    PriceRow,
    device_names,
    device_row,
    link_names,
    link_row,
    mode_names,
    mode_row,
    model_names,
    model_row,
    price_row,
    rack_sizes,
    region_names,
)

__all__ = [
    "DeviceRow",
    "LinkRow",
    "ModeRow",
    "ModelRow",
    "PriceRow",
    "device_names",
    "device_row",
    "link_names",
    "link_row",
    "mode_names",
    "mode_row",
    "model_names",
    "model_row",
    "price_row",
    "rack_sizes",
    "region_names",
]
