"""Parts of a job from the catalogue, for use from Python."""

from farpipe.catalog import LinkRow, device_row, link_row, model_row
from farpipe.spec.cluster import Device, LocalLink, Site
from farpipe.spec.model import Model
from farpipe.spec.written import USUAL_SITE_LINK


def preset_model(name: str) -> Model:
    """The catalogue's model of that name, ``"llama-3-8b"`` for example; ValueError if there is none."""
    row = model_row(name)
    return Model.model_validate({"name": row.name, **row.shape})


def preset_device(name: str) -> Device:
    """The catalogue's device of that name, ``"h100"`` for example; ValueError if there is none."""
    row = device_row(name)
    return Device.model_validate({key: getattr(row, key) for key in Device.model_fields})


def preset_site(name: str, device: str, num_devices: int) -> Site:
    """A site called `name` with `num_devices` of the catalogue's `device` and the links that a file gets by default."""
    return Site(
        name=name,
        device=preset_device(device),
        num_devices=num_devices,
        machine_link=_local(device_row(device).machine_link),
        site_link=_local(link_row(USUAL_SITE_LINK)),
    )


def _local(row: LinkRow) -> LocalLink:
    return LocalLink(latency_s=row.latency_s, bandwidth_bytes_per_s=row.bandwidth_bytes_per_s)
