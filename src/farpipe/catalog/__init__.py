"""Facts that everyone looks up: devices, models, typical links; each row with its source and date."""

from farpipe.catalog.rows import (
    DeviceRow,
    LinkRow,
    ModelRow,
    PriceRow,
    device_names,
    device_row,
    link_names,
    link_row,
    model_names,
    model_row,
    price_row,
    region_names,
)

__all__ = [
    "DeviceRow",
    "LinkRow",
    "ModelRow",
    "PriceRow",
    "device_names",
    "device_row",
    "link_names",
    "link_row",
    "model_names",
    "model_row",
    "price_row",
    "region_names",
]
