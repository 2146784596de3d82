"""Functions of a module: lookup by name, arguments and results by role, bodies in order."""

from collections.abc import Iterator, Sequence

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, FunctionType, ModuleOp, StringAttr
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

ROLE = "sp.role"


def functions(module: ModuleOp) -> list[FuncOp]:
    """Return the functions of a module in order."""
    return [op for op in module.body.block.ops if isinstance(op, FuncOp)]


def function(module: ModuleOp, name: str) -> FuncOp:
    """Return the function called `name`."""
    return next(f for f in functions(module) if f.sym_name.data == name)


def body(func: FuncOp) -> Block:
    """Return the one block of a function."""
    return func.body.block


def operations(module: ModuleOp) -> Iterator[Operation]:
    """Yield a snapshot of all operations inside functions, in order, skipping erased ones."""
    for func in functions(module):
        for op in list(body(func).ops):
            if op.parent is not None:
                yield op


def roles(attributes: ArrayAttr[DictionaryAttr] | None) -> list[str]:
    """Return the roles in `arg_attrs` or `res_attrs`."""
    found = []
    for entry in attributes.data if attributes is not None else ():
        role = entry.data[ROLE]
        assert isinstance(role, StringAttr)
        found.append(role.data)
    return found


def role_attributes(names: Sequence[str]) -> ArrayAttr[DictionaryAttr]:
    """Return `arg_attrs` or `res_attrs` that mark values with roles."""
    return ArrayAttr([DictionaryAttr({ROLE: StringAttr(name)}) for name in names])


def arguments(func: FuncOp) -> list[tuple[str, BlockArgument]]:
    """Return (role, argument) pairs of a function."""
    return list(zip(roles(func.arg_attrs), body(func).args, strict=True))


def role_of_argument(value: SSAValue) -> str | None:
    """Return the role of `value` if it is a function argument."""
    if not isinstance(value, BlockArgument):
        return None
    func = value.block.parent_op()
    return roles(func.arg_attrs)[value.index] if isinstance(func, FuncOp) else None


def return_op(func: FuncOp) -> ReturnOp:
    """Return the terminator of a function."""
    last = body(func).last_op
    assert isinstance(last, ReturnOp)
    return last


def results(func: FuncOp) -> list[tuple[str, SSAValue]]:
    """Return (role, value) pairs that a function returns."""
    return list(zip(roles(func.res_attrs), return_op(func).arguments, strict=True))


def set_results(func: FuncOp, values: Sequence[tuple[str, SSAValue]]) -> None:
    """Replace what a function returns."""
    old = return_op(func)
    body(func).insert_op_before(ReturnOp(*(value for _, value in values)), old)
    body(func).erase_op(old)
    func.properties["res_attrs"] = role_attributes([role for role, _ in values])
    refresh_type(func)


def refresh_type(func: FuncOp) -> None:
    """Make the function's type agree with its arguments and results."""
    outputs = [value.type for value in return_op(func).arguments]
    func.properties["function_type"] = FunctionType.from_lists(list(body(func).arg_types), outputs)
