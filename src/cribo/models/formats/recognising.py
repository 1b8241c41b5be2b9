"""Find a network in a weight file by its keys, and account for every other tensor.

Tensors of the network that match no rule are an error, because the network would compute something else without them.
Other tensors (heads, decoders, optimiser states, metrics) are ignored and listed.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import get_args

from torch import Tensor

from cribo.base.errors import InputError
from cribo.models.backbone import Backbone
from cribo.models.config import NetworkName
from cribo.models.formats.recognised import Expected, Recognised
from cribo.models.formats.table import (
    BESIDE,
    METRICS,
    NAMINGS,
    OWN,
    PROJECTS,
    REFUSED,
    TRAINING,
    Naming,
    Project,
    Rules,
)

# Names of the network to evaluate.
_TEACHER_LIKE = r"(^|[./_])(teacher|ema|model_ema|ema_params|momentum\w*|target\w*)([./_]|$)"
_WRAPPERS = r"(^|[./])(?:(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.)+"
_LISTED = 8
_USED, _BESIDE, _IGNORED = "", "not of the network", "ignored by request"


def recognise(
    tensors: Mapping[str, Tensor],
    source: str,
    *,
    network: NetworkName = "teacher",
    backbone: Backbone | None = None,
    ignore: Sequence[str] = (),
) -> Recognised:
    """Find a network in a file, account for every key, and rename the network's tensors to timm's names.

    Args:
        tensors: all tensors of the file, by path (`reading.flatten`).
        source: name of the file in error messages.
        network: `teacher` or `student`. The student is used if the file has no teacher.
        backbone: the backbone for the weights, if known: keys that it has keep their name, and a file of unknown
            naming is assumed to have its names.
        ignore: patterns of keys to ignore.

    Raises:
        ValueError: no format matches, the file contains several networks without a recognisable teacher, or it does
            not contain the requested network.
    """
    if network not in get_args(NetworkName):
        raise InputError(f"network must be one of {', '.join(get_args(NetworkName))}, got {network!r}")
    own = dict.fromkeys(backbone.model.state_dict()) if backbone is not None else {}
    tensors = _without_float8(tensors, source)
    # Prefixes of parallel training and compilation can occur anywhere in a key.
    originals = {re.sub(_WRAPPERS, r"\1", key): key for key in tensors}
    if len(originals) < len(tensors):
        twice = set(tensors) - set(originals.values())
        raise InputError(f"{source} contains keys that differ only in wrapper prefixes: {first_keys(sorted(twice))}")
    for pattern, reason in REFUSED:
        if any(re.search(pattern, key) for key in originals):
            raise InputError(f"{source} {reason}")
    project = next((project for project in PROJECTS if _matches(project.needs, originals)), None)
    found = _networks(originals, own)
    if not found:
        like = f", although its other keys match {project.name}" if project else ""
        raise InputError(
            f"{source} contains no network in a known format{like}; its first keys are "
            f"{first_keys(originals) or 'none'}: give the timm name of its architecture, if it has one"
        )
    prefix, taken = _choose(found, project, network, source)
    naming = found[prefix]
    groups = {
        key: _IGNORED
        if any(re.search(pattern, originals[key]) for pattern in ignore)
        else _group(key, prefix, found, project, own, tensors[originals[key]])
        for key in originals
    }
    used = [key for key, group in groups.items() if group == _USED]
    state = {key.removeprefix(prefix): tensors[originals[key]] for key in used}
    is_own = backbone is not None and required_keys(backbone) <= state.keys()
    expected = (project.expected if project else Expected()).over(naming.expected)
    num_heads = naming.count_heads(state)
    if not is_own:
        try:
            state = naming.rename(state)
            state = project.adapt(state) if project else state
        except Exception as error:  # of missing tensors or impossible shapes
            raise InputError(
                f"{source} does not contain a complete network of {naming.name} ({type(error).__name__}: {error})"
            ) from error
    periods = state.pop("rope_embed.periods", None)
    return Recognised(
        format=(project or naming).name,
        configure=(project or naming).configure,
        network=taken,
        part=originals[used[0]].removesuffix(used[0].removeprefix(prefix)),
        state=state,
        used=tuple(originals[key] for key in used),
        dropped={
            name: tuple(originals[key] for key, group in groups.items() if group == name)
            for name in dict.fromkeys(group for group in groups.values() if group != _USED)
        },
        num_heads=num_heads,
        expected=expected,
        rope_periods=None if periods is None else tuple(periods.float().tolist()),
        notes=tuple(_notes(expected, taken, network, [key for key, group in groups.items() if group == _BESIDE])),
    )


def _without_float8(tensors: Mapping[str, Tensor], source: str) -> Mapping[str, Tensor]:
    """Convert tensors of eight-bit floats, which have no arithmetic; refuse those that are multiplied by scales."""
    short = {key for key, value in tensors.items() if str(value.dtype).startswith("torch.float8_")}
    if not short:
        return tensors
    modules = {re.sub(r"[^./]*$", "", key) for key in short}
    scales = [key for key in tensors if re.search(_SCALE, key) and re.sub(r"[^./]*$", "", key) in modules]
    if scales:
        raise InputError(
            f"{source} has {len(short)} quantised tensors, of type float8, and their scales ({first_keys(scales)}): "
            "dequantise them with the library that wrote them, and save its state dict as floating-point numbers"
        )
    return {key: value.float() if key in short else value for key, value in tensors.items()}


_SCALE = r"(?i)(scale|scb|amax|absmax)[^./]*$"


def first_keys(keys: Iterable[str]) -> str:
    """Return the first few keys, for an error message."""
    keys = list(keys)
    return ", ".join(keys[:_LISTED]) + (", ..." if len(keys) > _LISTED else "")


def required_keys(backbone: Backbone) -> set[str]:
    """Return the keys that weights must have: old files lack batch norm counters, and heads are not read."""
    return {
        key
        for key in backbone.model.state_dict()
        if key not in backbone.unused_parameters and not key.endswith("num_batches_tracked")
    }


def _matches(needs: Iterable[str], keys: Iterable[str]) -> bool:
    return all(any(re.search(pattern, key) for key in keys) for pattern in needs)


def _networks(keys: Collection[str], own: Collection[str]) -> dict[str, Naming]:
    """Return the naming of each network in a file, by prefix."""
    keys = [key for key in keys if not re.search(TRAINING, key)]  # optimisers store copies of every weight
    found: dict[str, Naming] = {}
    for naming in NAMINGS:
        for prefix in _prefixes(naming.anchor, keys):
            inner = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
            if prefix not in found and _matches(naming.needs, inner):
                found[prefix] = naming
    if found or not own:
        return found
    fitting = Counter(
        key[: match.end()] for key in keys for match in re.finditer(r"^|[./]", key) if key[match.end() :] in own
    )
    if fitting:
        most = max(fitting.values())
        return dict.fromkeys((prefix for prefix, count in fitting.items() if count == most), OWN)
    # Names of another library, which timm may be able to read; they are under one key or none.
    containers = {key.partition("/")[0] + "/" for key in keys if "/" in key}
    return dict.fromkeys(containers if len(containers) == 1 else {""}, OWN) if keys else {}


def _prefixes(anchor: str, keys: Iterable[str]) -> list[str]:
    matches = (re.fullmatch(rf"(.*[./])?{anchor}", key) for key in keys)
    return [match[1] or "" for match in matches if match]


def _choose(
    found: Mapping[str, Naming], project: Project | None, network: NetworkName, source: str
) -> tuple[str, NetworkName | None]:
    """Return the prefix of the network to use, and its kind."""
    if project is not None:
        roles: dict[NetworkName, str | None] = {"teacher": project.teacher, "student": project.student}
        by_role = {
            role: [prefix for prefix in found if pattern is not None and re.fullmatch(pattern, prefix)]
            for role, pattern in roles.items()
        }
    else:
        teachers = [prefix for prefix in found if re.search(_TEACHER_LIKE, prefix)]
        by_role = {"teacher": teachers, "student": [prefix for prefix in found if prefix not in teachers]}
    named = ", ".join(repr(prefix) for prefix in found)
    if len(found) == 1 and network == "student" and not any("student" in prefix for prefix in by_role["student"]):
        raise InputError(f"{source} contains one network, under the prefix {named}, and no student: do not set network")
    if len(by_role[network]) == 1:
        is_only = len(found) == 1 and (project is None or project.student is None)
        return by_role[network][0], None if is_only else network
    if network == "teacher" and not by_role["teacher"] and len(by_role["student"]) == 1:
        return by_role["student"][0], None if project is None else "student"
    raise InputError(
        f"{source} contains several networks, under the prefixes {named}, none marked as the {network}: save "
        "the one to use in a separate file"
    )


def _group(
    key: str,
    prefix: str,
    found: Mapping[str, Naming],
    project: Project | None,
    own: Collection[str],
    tensor: Tensor,
) -> str:
    """Return the group of a key: the network in use, or a group that is ignored."""
    if re.search(TRAINING, key):
        return "training state"
    # Prefixes may be nested: the longest one determines the network.
    owner = max((each for each in found if key.startswith(each)), key=len, default=None)
    if owner is not None and owner != prefix:
        roles: dict[str, str | None] = {"student": None, "teacher": None}
        if project is not None:
            roles = {"student": project.student, "teacher": project.teacher}
        return next((role for role, pattern in roles.items() if pattern and re.fullmatch(pattern, owner)), _OTHER)
    rules = project.dropped if project else ()
    if owner is None:
        return _first_match((*rules, *BESIDE), key) or _BESIDE
    inner = key.removeprefix(prefix)
    if inner in own:
        return _USED
    if group := _first_match(found[prefix].dropped, inner) or _first_match((*rules, METRICS), key):
        return group
    # A network is in one container of a nested file; scalars beside it, such as a best score, are not part of it.
    if ("/" in inner and not found[prefix].is_nested) or (tensor.ndim == 0 and "num_batches_tracked" not in key):
        return _first_match(BESIDE, key) or _BESIDE
    return _USED


_OTHER = "other network"


def _first_match(rules: Rules, key: str) -> str | None:
    return next((group for group, pattern in rules if re.search(pattern, key)), None)


def _notes(expected: Expected, taken: NetworkName | None, network: NetworkName, beside: Sequence[str]) -> Iterator[str]:
    if taken is not None and taken != network:
        yield f"the file contains no {network}: using its {taken}"
    if expected.note:
        yield expected.note
    if beside:
        yield f"ignored {len(beside)} tensors that do not belong to the network: {first_keys(beside)}"
