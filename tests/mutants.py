"""Plants small mistakes in the core files, one at a time, and sees that the tests catch them.

    python -m tests.mutants --mutants=300 --seed=0

A mutant is one of FILES with one place changed: another operator or number, two arguments swapped, a condition, an
argument, a bound, a call or a statement left out. Prints and the messages of errors stay as they are. Each is written
into a copy of the checkout and meets the tests; what lives is printed: a test is missing, or it does the same as the
original. Processes are forked, so that torch is imported once: not on Windows.
"""

import ast
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch._dynamo  # with all of torch; once, here, and not in every process  # noqa: F401

ROOT = Path(__file__).parent.parent
FILES = ["model.py", "blocks.py", "generation.py", "initial.py", "linear.py", "dropout.py", "attention_numpy.py"]
ROUNDS = ["attention model", "run_log cost cases check_port export"]  # of tests; those left out are slow
OTHERS = {  # operators: a name, and the names that may stand in its place
    "Add": "Sub", "Sub": "Add", "Mult": "Div", "Div": "Mult", "FloorDiv": "Mult", "Mod": "FloorDiv", "Pow": "Mult",
    "MatMult": "Mult", "And": "Or", "Or": "And", "Not": "USub", "USub": "UAdd", "Eq": "NotEq", "NotEq": "Eq",
    "Lt": "LtE GtE", "LtE": "Lt Gt", "Gt": "GtE LtE", "GtE": "Gt Lt", "Is": "IsNot", "IsNot": "Is", "In": "NotIn",
}  # fmt: skip


@dataclass
class MutantsConfig:
    mutants: int = 300
    seed: int = 0


def changed(node, **fields):
    """A copy of a node with other fields."""
    return type(node)(**{**vars(node), **fields})


def swaps(items):
    """The list with two neighbours swapped, in every way."""
    return ([*items[:i], items[i + 1], items[i], *items[i + 2 :]] for i in range(len(items) - 1))


def mutations(node):
    """The nodes that can stand in a node's place."""
    match node:
        case ast.operator() | ast.boolop() | ast.unaryop() | ast.cmpop():
            yield from (getattr(ast, name)() for name in OTHERS.get(type(node).__name__, "").split())
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):  # never -value: an axis counted from its other end is the same axis
            yield from map(ast.Constant, (value + 1, value - 1))
        case ast.Constant(float(value)):
            yield from map(ast.Constant, (value + 1, value - 1, value * 2, *[-value] * (value != 0)))
        case ast.UnaryOp() | ast.BinOp() | ast.BoolOp() | ast.IfExp():  # one part alone
            yield from (part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))
        case ast.Tuple(elements) | ast.List(elements):
            yield from (changed(node, elts=swapped) for swapped in swaps(elements))
        case ast.Slice():
            for name, bound in ast.iter_fields(node):
                if bound is not None:
                    if (name, ast.unparse(bound)) != ("lower", "0"):  # x[0:] is x[:]
                        yield changed(node, **{name: None})
                    yield changed(node, **{name: ast.BinOp(bound, ast.Add(), ast.Constant(1))})
        case ast.Call(function, arguments, keywords):
            yield from (changed(node, args=swapped) for swapped in swaps(arguments))
            yield from (changed(node, keywords=[k for k in keywords if k is not out]) for out in keywords)
            yield from (x for x in arguments[:1] if not isinstance(x, ast.Starred))  # f(x, ..) -> x
            if isinstance(function, ast.Attribute) and not (arguments and isinstance(function.value, ast.Name)):
                yield function.value  # x.f(..) -> x
        case ast.Name("min" | "max" as name):
            yield ast.Name({"min": "max", "max": "min"}[name])
        case ast.FunctionDef(decorator_list=[_, *rest]):
            yield changed(node, decorator_list=rest)
        case ast.If(test):
            yield from (ast.Pass(), changed(node, test=ast.UnaryOp(ast.Not(), test)))
        case ast.Assign() | ast.AugAssign() | ast.Expr() | ast.Assert() | ast.For():
            yield ast.Pass()
    if isinstance(node, ast.BinOp) and not isinstance(node.op, (ast.Add, ast.Mult)):
        yield changed(node, left=node.right, right=node.left)


def places(node):
    """(parent, field, index in it or None, child) of all that may change below a node."""
    for field, value in ast.iter_fields(node):
        for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            match child:
                case ast.Expr(ast.Constant()) | ast.Expr(ast.Call(ast.Name("print"))) | ast.Raise():
                    continue
            if isinstance(child, ast.AST) and field not in ("annotation", "msg"):
                yield node, field, i, child
                yield from places(child)


def mutants(rng):
    """(file, source, what is changed) in random order; no two have the same source."""
    trees = {file: ast.parse((ROOT / file).read_text(encoding="utf-8")) for file in FILES}
    originals = {file: ast.unparse(tree) for file, tree in trees.items()}
    sites = [(file, *place, new) for file in FILES for place in places(trees[file]) for new in mutations(place[-1])]
    seen = set(originals.values())
    for file, parent, field, i, old, new in rng.sample(sites, len(sites)):
        before = getattr(parent, field)
        setattr(parent, field, new if i is None else [*before[:i], new, *before[i + 1 :]])
        source = ast.unparse(trees[file])
        setattr(parent, field, before)
        if source not in seen:
            seen.add(source)
            lines = zip(originals[file].splitlines(), source.splitlines())
            was, now = next((was.strip(), now.strip()) for was, now in lines if was != now)
            yield file, source, f"{file}:{getattr(old, 'lineno', None) or parent.lineno}: {was}\n -> {now}"


def run(root, tests, limit):
    """The exit status of tests in a process of its own: 0 if all pass, -SIGALRM after `limit` seconds."""
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        signal.alarm(limit)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os.chdir(root)
        sys.path[0] = str(root)  # was the checkout
        sys.modules.pop("tests")
        options = ["-x", "-n0", "-p", "no:cacheprovider", f"--basetemp={root.parent / 'tmp'}"]
        os._exit(pytest.main(options + [f"tests/test_{name}.py" for name in tests.split()]))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.system(f"kill -9 -- -{pid} 2> /dev/null")  # what it has started itself
    return code


def main():
    import tyro

    cfg, slow = tyro.cli(MutantsConfig, description=__doc__), 0
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # one that is as long and as old as another would be taken for it
    sys.dont_write_bytecode = True
    left = [mutant for mutant, _ in zip(mutants(random.Random(cfg.seed)), range(cfg.mutants))]
    total = len(left)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"))
        for tests in ROUNDS:
            start, met, left = time.time(), left, []
            assert run(root, tests, limit=1200) == 0, f"not all of {tests} pass as it is"
            limit = 30 + 5 * round(time.time() - start)
            print(f"{len(met)} mutants meet {tests}, each for {limit} s at most", flush=True)
            for file, source, change in met:
                original = (root / file).read_bytes()
                (root / file).write_text(source, encoding="utf-8")
                code = run(root, tests, limit)
                (root / file).write_bytes(original)
                slow += code == -signal.SIGALRM
                if code == 0:
                    left.append((file, source, change))
                    print(change, flush=True)
    print(f"{total - len(left)} of {total} caught, {slow} of them by time; {len(left)} live")


if __name__ == "__main__":
    main()
