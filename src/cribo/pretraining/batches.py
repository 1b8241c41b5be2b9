"""Batches that fit the number of images: their size, groups and micro-batches. This module does not import torch."""

import math
from dataclasses import replace

from cribo.base.wording import joined
from cribo.pretraining.config import PretrainConfig


def fit_batch(config: PretrainConfig, num_images: int, devices: int = 1) -> PretrainConfig:
    """Return the configuration with the largest batch that a few images can fill, at most that of the configuration.

    Groups become smaller if they do not fit, and micro-batches fewer, none of them with more images than before.

    Args:
        config: the configuration; returned unchanged if it has no more images per batch than there are.
        num_images: number of images or clips, at least the number of devices.
        devices: number of processes of the run.

    Example:
        >>> from cribo.pretraining import load_config
        >>> fitted = fit_batch(load_config("imagenet_vits16"), 20)
        >>> fitted.optim.batch_size, fitted.objects.group_size
        (20, 20)
    """
    optim, objects = config.optim, config.objects
    if num_images >= optim.batch_size:
        return config
    micro_batches = math.ceil(num_images * optim.micro_batches / optim.batch_size)
    parts = micro_batches * devices
    if parts > num_images:
        micro_batches, parts = 1, devices
    group = max(1, min(objects.group_size, num_images // parts))
    batch = num_images // (group * parts) * group * parts
    return replace(
        config,
        objects=replace(objects, group_size=group),
        optim=replace(optim, batch_size=max(batch, 1), micro_batches=micro_batches),
    )


def advice_for_few(config: PretrainConfig, num_images: int, devices: int = 1) -> str:
    """Return all options with which a batch fits fewer images than it has, as advice for an error."""
    if num_images < devices:
        return f"add images, or set runtime.devices to {max(1, num_images)} or less"
    fitted = fit_batch(config, num_images, devices)
    values = {
        "optim.batch_size": (config.optim.batch_size, fitted.optim.batch_size),
        "optim.micro_batches": (config.optim.micro_batches, fitted.optim.micro_batches),
        "objects.group_size": (config.objects.group_size, fitted.objects.group_size),
    }
    changes = [f"{name} to {after}" for name, (before, after) in values.items() if before != after]
    return f"add images, or set {joined(changes, 'and')}"


def advice_for_groups(config: PretrainConfig, num_images: int, images_per_group: int | None, devices: int = 1) -> str:
    """Return the options with which a batch consists of whole groups, as advice for an error.

    Args:
        config: the configuration, whose batch does not.
        num_images: number of images or clips.
        images_per_group: size of a group if it is not `objects.group_size`.
        devices: number of processes of the run.
    """
    batch, parts = config.optim.batch_size, config.optim.micro_batches * devices
    whole = parts * (images_per_group or config.objects.group_size)
    larger, smaller = math.ceil(batch / whole) * whole, batch // whole * whole
    ways = []
    if images_per_group is None and batch % parts == 0:
        share = batch // parts
        most = min(share, config.objects.group_size)
        ways.append(f"set objects.group_size to {next(size for size in range(most, 0, -1) if share % size == 0)}")
    if larger <= num_images or smaller:
        ways.append(f"set optim.batch_size to {larger if larger <= num_images else smaller}")
    if parts > 1:
        ways.append("use fewer micro-batches or devices")
    return joined(ways, "or") or f"add images, to at least {whole}"
