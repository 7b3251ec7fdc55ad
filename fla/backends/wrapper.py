# SPDX-License-Identifier: MIT
"""The public function in front of an op, written out as source text with the op's own signature.

Binding then costs nothing, a traceback reads like ordinary code, and Dynamo traces it. Not functools.wraps: over a
function excluded from compilation it copies the marker by which Dynamo unwraps it, and the wrapper is lost.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import warnings
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, TypeVar, overload

from fla import settings
from fla.backends import record
from fla.backends.facts import CallFacts, Capability, needs_backward
from fla.backends.op import DispatchedOp
from fla.backends.signature import argument_text

F = TypeVar("F", bound=Callable[..., Any])


class _NotGiven:
    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN = _NotGiven()


@overload
def dispatch(entry_point: F) -> F: ...


@overload
def dispatch(
    entry_point: str,
    *,
    validate: Callable[..., None] | None = None,
    facts: CallFacts | None = None,
    outputs: Callable[..., Any] | None = None,
    renamed: Mapping[str, str] | None = None,
    removed: Mapping[str, str] | None = None,
    triton: str | None = None,
    triton_capability: Capability | None = None,
    triton_verifier: Callable[..., Any] | None = None,
    inplace: bool = False,
    differentiable: bool = True,
) -> Callable[[F], F]: ...


def dispatch(entry_point: Any, **options: Any) -> Any:
    """Make a function one that backends can take over. Its body stays the core's PyTorch path.

    ``@dispatch("kda")`` puts it into an operation; bare ``@dispatch`` gives it a registry of its own, addressed by the
    function (``@register(fn)``).

    Args:
        entry_point: name of the operation, or the function.
        validate: called with a value for each parameter, in order, before anything is selected; raises on bad input.
        facts: from which parameters the static facts of a call are read.
        outputs: same parameters; empty results of the right shape, dtype and device, for torch.compile. Without it the
            body itself is traced.
        renamed: keywords of earlier releases and their new names. None and False count as not given; both names given
            is a ValueError, the old one a DeprecationWarning.
        removed: keywords of earlier releases that raise DeprecationWarning with this message when passed.
        triton: core's Triton path, ``"module:function"`` with the same parameters, imported at the first use.
        triton_capability, triton_verifier: what that path covers; for other calls the body runs.
        inplace: the op writes into its arguments, so a backend that failed is never replaced by another.
        differentiable: results take part in autograd. A backend whose results do not, though a gradient is due, failed.
    """
    if isinstance(entry_point, str):

        def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
            return _dispatched(entry_point, fn, None, options)

        return decorate
    if not callable(entry_point):
        raise TypeError(f"dispatch takes an operation's name or a function, got {entry_point!r}")
    if options:
        raise TypeError(f"bare dispatch takes no options, got {', '.join(options)}; give the operation's name first")
    key = f"{entry_point.__module__}:{entry_point.__qualname__}:{id(entry_point):x}"
    return _dispatched(entry_point.__module__, entry_point, key, {})


def _dispatched(operation: str, fn: Callable[..., Any], key: str | None, options: dict[str, Any]) -> Callable[..., Any]:
    renamed = dict(options.pop("renamed", None) or {})
    removed = dict(options.pop("removed", None) or {})
    if not getattr(fn, "__name__", "").isidentifier():
        raise TypeError(f"dispatch wraps a function that has a name, got {fn!r}")
    op = DispatchedOp(operation, fn, key=key, **options)
    for old in (*renamed, *removed):
        if old in op.signature.parameters:
            raise ValueError(f"{op}: {old} is renamed or removed and still a parameter")
    for new in renamed.values():
        if new not in op.signature.parameters:
            raise ValueError(f"{op}: {new} is the new name of a keyword and no parameter")
    return build(op, renamed, removed)


def build(op: DispatchedOp, renamed: Mapping[str, str], removed: Mapping[str, str]) -> Callable[..., Any]:
    """Compile the wrapper of ``op``."""
    source = _source(op, renamed, removed)
    filename = f"{settings.GENERATED} {op}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {}
    # The op's own globals, so that annotations of the wrapper mean what they mean there.
    exec(compile(source, filename, "exec"), op.fn.__globals__, namespace)
    defaults = [p.default for p in op.signature.parameters.values()]
    wrapper: Any
    wrapper, op.key_of, op.device_of, op.cheap_of, bind = namespace["_fla_make"](
        op,
        op.fn,
        op.validate,
        defaults,
        settings.current_context,
        settings.environment_isdisjoint,
        settings.environment_get,
        tuple,
        map,
        record.thread,
        NOT_GIVEN,
        _renamed,
        dict(removed),
        needs_backward,
        type,
    )
    op.bind_torch = _binder(op, bind)
    op.bind_torch()
    wrapper.__name__, wrapper.__qualname__ = op.fn.__name__, op.fn.__qualname__
    wrapper.__module__, wrapper.__doc__ = op.fn.__module__, op.fn.__doc__
    wrapper.__annotations__ = dict(op.fn.__annotations__)
    wrapper.op = op
    return wrapper


def _binder(op: DispatchedOp, bind: Callable[..., None]) -> Callable[[], None]:
    bound = False

    def bind_torch() -> None:
        """Give the generated code torch's functions once something has imported torch."""
        nonlocal bound
        torch: Any = sys.modules.get("torch")
        if bound or not hasattr(torch, "compiler"):  # not there, or half-way through its own import
            return
        bound = True
        if op.outputs is None:
            bind(torch.compiler.is_compiling, None, torch.is_grad_enabled)
            return
        from fla.backends._compile import bridge

        bind(torch.compiler.is_compiling, bridge(op), torch.is_grad_enabled)

    return bind_torch


def _renamed(op: DispatchedOp, old: str, value: Any, new: str, given: Any, compiling: bool) -> Any:
    """The value of ``new``, taken from its old keyword."""
    default = op.signature.parameters[new].default
    if given is not default and given is not None and given is not False:
        raise ValueError(f"{op.name}: both {new} and its old name {old} were given; use {new}")
    if not compiling:  # Dynamo cannot trace a warning
        warnings.warn(f"{op.name}: {old} is called {new} now", DeprecationWarning, settings.callers_level())
    return value


# Source text


def _source(op: DispatchedOp, renamed: Mapping[str, str], removed: Mapping[str, str]) -> str:
    names = list(op.signature.parameters)
    in_order = ", ".join(names)
    packed = f"({in_order}{',' if len(names) == 1 else ''})"
    called = argument_text(op.signature)
    body: list[str] = []
    for old in removed:
        body += [f"if {old} is not _fla_not_given:", f"    raise DeprecationWarning(_fla_removed[{old!r}])"]
    for old, new in renamed.items():
        body += [
            f"if {old} is not None and {old} is not False:",
            f"    {new} = _fla_renamed(_fla_op, {old!r}, {old}, {new!r}, {new}, _fla_is_compiling())",
        ]
    # The first test is the one that Dynamo answers with a constant; what follows is not traced.
    compiled = f"_fla_compiled_call(_fla_op, {packed})" if op.outputs is not None else f"_fla_fn({called})"
    if op.outputs is None and op.validate is not None:
        body.append(f"_fla_validate({in_order})")
    body += ["if _fla_is_compiling():", f"    return {compiled}"]
    stale = [
        "    _fla_plan.context is not _fla_context()",
        "    or not (",
        "        _fla_isdisjoint(_fla_plan.watched)",
        "        if _fla_plan.snapshot is None",
        "        else _fla_tuple(_fla_map(_fla_get, _fla_plan.watched)) == _fla_plan.snapshot",
        "    )",
    ]
    body += [
        "_fla_plan = _fla_op.plan",
        "if _fla_plan is not None and _fla_plan.doors and not (",
        *stale,
        "):",
        f"    _fla_door = _fla_plan.doors.get(({', '.join(f'_fla_type({name})' for name in names)},))",
        f"    if _fla_door is not None and (_fla_result := _fla_door.enter({in_order})) is not None:",
        "        return _fla_result",
    ]
    if op.outputs is not None and op.validate is not None:
        body.append(f"_fla_validate({in_order})")
    body += [
        "_fla_plan = _fla_op.plan",
        "if _fla_plan is None or (",
        *stale,
        "):",
        "    _fla_plan = _fla_op.replan()",
        "_fla_core = _fla_plan.constant",
        "if _fla_core is not None:",
        f"    _fla_result = _fla_core({called})",
        "    _fla_thread.decision = _fla_plan.decision",
        "    _fla_cell[0] += 1",
        "    return _fla_result",
        "try:",
        f"    _fla_device = {_device_text(op)}",
        "    _fla_entry = None",
        "    if _fla_plan.by_device is not None:",
        "        _fla_entry = _fla_plan.by_device.get(_fla_device)",
        "    if _fla_entry is None and _fla_plan.by_cheap is not None:",
        f"        _fla_entry = _fla_plan.by_cheap.get({_cheap_text(op)})",
        "    if _fla_entry is None:",
        f"        _fla_entry = _fla_plan.memo.get({_key_text(op)})",
        "except (AttributeError, TypeError, IndexError):  # the slow way says what is wrong, or that nothing is",
        "    _fla_entry = None",
        "if _fla_entry is None:",
        f"    _fla_entry = _fla_op.entry(_fla_plan, {packed})",
        "_fla_core = _fla_entry.direct",
        "if _fla_core is not None:",
        f"    _fla_result = _fla_core({called})",
        "    _fla_thread.decision = _fla_entry.decision",
        "    _fla_entry.cell[0] += 1",
        "    return _fla_result",
        f"return _fla_op.choose(_fla_plan, _fla_entry, {packed})",
    ]
    indent = "        "
    return "\n".join(
        [
            "def _fla_make(_fla_op, _fla_fn, _fla_validate, _fla_defaults, _fla_context, _fla_isdisjoint,",
            "              _fla_get, _fla_tuple, _fla_map, _fla_thread, _fla_not_given, _fla_renamed, _fla_removed,",
            "              _fla_needs_backward, _fla_type):",
            "    _fla_is_compiling = _fla_grad = lambda: False",
            "    _fla_compiled_call = None",
            "    _fla_cell = _fla_op.core_cell",
            "",
            f"    def {op.name}({_parameter_text(op, renamed, removed)}):",
            *(indent + line for line in body),
            "",
            f"    def _fla_device_of({in_order}):",
            f"        return {_device_text(op)}",
            "",
            f"    def _fla_cheap_of({in_order}):",
            f"        _fla_device = {_device_text(op)}",
            f"        return {_cheap_text(op)}",
            "",
            f"    def _fla_key_of(_fla_plan, {in_order}):",
            f"        _fla_device = {_device_text(op)}",
            f"        return {_key_text(op)}",
            "",
            "    def _fla_bind(is_compiling, compiled_call, grad):",
            "        nonlocal _fla_is_compiling, _fla_compiled_call, _fla_grad",
            "        _fla_is_compiling, _fla_compiled_call, _fla_grad = is_compiling, compiled_call, grad",
            "",
            f"    return {op.name}, _fla_key_of, _fla_device_of, _fla_cheap_of, _fla_bind",
            "",
        ]
    )


def _parameter_text(op: DispatchedOp, renamed: Mapping[str, str], removed: Mapping[str, str]) -> str:
    parts: list[str] = []
    star = slash = False
    tail: list[str] = []
    for i, p in enumerate(op.signature.parameters.values()):
        default = "" if p.default is Parameter.empty else f"=_fla_defaults[{i}]"
        if p.kind is Parameter.POSITIONAL_ONLY:
            slash = True
        elif slash:
            parts.append("/")
            slash = False
        if p.kind is Parameter.VAR_POSITIONAL:
            parts.append(f"*{p.name}")
            star = True
        elif p.kind is Parameter.VAR_KEYWORD:
            tail.append(f"**{p.name}")
        else:
            if p.kind is Parameter.KEYWORD_ONLY and not star:
                parts.append("*")
                star = True
            parts.append(f"{p.name}{default}")
    if slash:
        parts.append("/")
    old = [f"{name}=None" for name in renamed] + [f"{name}=_fla_not_given" for name in removed]
    if old and not star:
        parts.append("*")
    return ", ".join(parts + old + tail)


def _device_text(op: DispatchedOp) -> str:
    return f"{op.facts.tensors[0]}.device" if op.facts.tensors else "None"


def _cheap_text(op: DispatchedOp) -> str:
    """See ``Facts.cheap``."""
    facts = op.facts
    items = ["_fla_device", *(f"{name}.dtype" for name in facts.tensors[:1])]
    items += [f"{name}.shape[-1]" for name in dict.fromkeys((facts.key, facts.value)) if name is not None]
    return f"({', '.join(items)},)"


def _key_text(op: DispatchedOp) -> str:
    """The static signature: what capabilities are checked against, and the flags. ``_fla_plan`` says what matters."""
    facts = op.facts
    items = ["_fla_device"]
    if facts.tensors:
        items.append(_guarded("dtypes", [f"{name}.dtype" for name in facts.tensors]))
    dims: list[str] = []
    if facts.key is not None:
        dims.append(f"(_fla_k := {facts.key}.shape)[-1]")
        if facts.value is not None and facts.value != facts.key:
            dims += [f"(_fla_v := {facts.value}.shape)[-1]"]
            dims += [f"_fla_k[{facts.heads_dim}] == _fla_v[{facts.heads_dim}]"]
    elif facts.value is not None:
        dims.append(f"{facts.value}.shape[-1]")
    items.append(_guarded("dims", dims))
    options = [f"{name} is None" for name in (facts.initial_state, facts.cu_seqlens) if name is not None]
    items.append(_guarded("options", options + ([facts.state_v_first] if facts.state_v_first is not None else [])))
    items.append(_guarded("flags", [p.name for p in op.signature.parameters.values() if isinstance(p.default, bool)]))
    terms = [term for p in op.signature.parameters.values() if (term := _gradient_term(p)) is not None]
    if terms:
        items.append(f"_fla_plan.backward and _fla_grad() and ({' or '.join(terms)})")
    return f"({', '.join(filter(None, items))},)"


def _guarded(part: str, items: list[str]) -> str:
    return f"_fla_plan.{part} and ({', '.join(items)},)" if items else ""


def _gradient_term(p: Parameter) -> str | None:
    """Expression that says whether an argument requires a gradient; None where annotation or default rule it out."""
    if isinstance(p.default, bool | int | float | str):
        return None
    annotation = p.annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    if annotation is Parameter.empty or text in ("Any", "typing.Any", "object"):
        if p.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            return f"_fla_needs_backward({p.name})"
        return f"getattr({p.name}, 'requires_grad', False)"
    if text in ("torch.Tensor", "Tensor") and p.default is Parameter.empty:
        return f"{p.name}.requires_grad"
    plain = {"torch.Tensor", "Tensor", "torch.LongTensor", "torch.IntTensor", "LongTensor", "None"}
    if {part.strip() for part in text.replace("Optional[", "").replace("]", "").split("|")} <= plain:
        integers = "LongTensor" in text or "IntTensor" in text
        return None if integers else f"({p.name} is not None and {p.name}.requires_grad)"
    words = ("int", "float", "bool", "str", "None", "torch.dtype", "torch.device")
    if all(part.strip() in words for part in text.split("|")):
        return None
    return f"_fla_needs_backward({p.name})"
