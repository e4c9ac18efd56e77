"""Plants small mistakes in the core files, one at a time, and sees that the tests catch them.

    python -m tests.mutants --mutants=300 --seed=0

A mutant is one of FILES with one place changed: another operator or number, two arguments swapped, a condition, an
argument, a bound, a call or a statement left out. Prints and the messages of errors stay as they are. Each is written
into a copy of the checkout and meets the tests; what lives is printed: a test is missing, or it does the same as the
original. Processes are forked, so that torch is imported once: not on Windows.
"""

import ast
import copy
import importlib
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

ROOT = Path(__file__).parent.parent
FILES = ["model.py", "generation.py", "attention_numpy.py"]
ROUNDS = [  # most die in the first; the other tests do not look at FILES
    ["attention", "model"],
    ["run_log", "memory", "cases", "check_port", "fuzz", "distributed", "export", "experiments"],
    ["train"],
]
HEAVY = "torch._dynamo torch.profiler torch.utils.flop_counter matplotlib.pyplot tyro tiktoken".split()
PAIRS = "Add Sub, Mult Div, FloorDiv Mult, Mod FloorDiv, Pow Mult, MatMult Mult, And Or, Lt LtE, Lt GtE, Gt LtE, \
Gt GtE, Eq NotEq, Is IsNot, In NotIn".split(", ")
OTHERS = {}  # the operators that may stand in an operator's place
for one, other in (map(ast.__dict__.get, pair.split()) for pair in PAIRS):
    OTHERS[one], OTHERS[other] = [*OTHERS.get(one, []), other], [*OTHERS.get(other, []), one]


@dataclass
class MutantsConfig:
    mutants: int = 300
    seed: int = 0


def changed(node, **fields):
    """A copy of a node with other fields."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def swaps(items):
    """The list with two neighbours swapped, in every way; a * stays where it is."""
    for i, pair in enumerate(zip(items, items[1:])):
        if not any(isinstance(item, ast.Starred) for item in pair):
            yield [*items[:i], *pair[::-1], *items[i + 2 :]]


def mutations(node):
    """The nodes that can stand in a node's place."""
    match node:
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield from map(ast.Constant, (value + 1, value - 1, -value))
        case ast.Constant(float(value)):
            yield from map(ast.Constant, (value + 1, value * 2, -value))
        case ast.UnaryOp(_, operand):
            yield operand
        case ast.BinOp(left, op, right):
            yield from (left, right, *(changed(node, op=new()) for new in OTHERS[type(op)]))
            if not isinstance(op, (ast.Add, ast.Mult)):
                yield changed(node, left=right, right=left)
        case ast.BoolOp(op, values):
            yield from (*values, *(changed(node, op=new()) for new in OTHERS[type(op)]))
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield from (changed(node, ops=[*ops[:i], new(), *ops[i + 1 :]]) for new in OTHERS[type(op)])
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse, changed(node, body=orelse, orelse=body))
        case ast.Tuple(elements) | ast.List(elements):
            yield from (changed(node, elts=swapped) for swapped in swaps(elements))
        case ast.Slice():
            for name, bound in ast.iter_fields(node):
                if bound is not None:
                    more = ast.BinOp(bound, ast.Add(), ast.Constant(1))
                    yield from (changed(node, **{name: None}), changed(node, **{name: more}))
        case ast.FunctionDef(decorator_list=marks) if marks:
            yield changed(node, decorator_list=marks[1:])
        case ast.Call(function, arguments, keywords):
            yield from (changed(node, args=swapped) for swapped in swaps(arguments))
            yield from (changed(node, keywords=[*keywords[:i], *keywords[i + 1 :]]) for i in range(len(keywords)))
            match function:
                case ast.Name("min" | "max" as name):
                    yield changed(node, func=ast.Name({"min": "max", "max": "min"}[name]))
                case ast.Attribute(x) if not isinstance(x, ast.Name) or not arguments:
                    yield x  # x.f(..) -> x
            if arguments and not isinstance(arguments[0], ast.Starred):
                yield arguments[0]  # f(x, ..) -> x
        case ast.AugAssign(op=op):
            yield from (changed(node, op=new()) for new in OTHERS[type(op)])
        case ast.If(test):
            yield changed(node, test=ast.UnaryOp(ast.Not(), test))
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr, ast.Assert, ast.If, ast.For)):
        yield ast.Pass()


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
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in FILES}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    sites = [(file, *place, new) for file in FILES for place in places(trees[file]) for new in mutations(place[-1])]
    seen = {ast.unparse(tree) for tree in trees.values()}
    for file, parent, field, i, old, new in rng.sample(sites, len(sites)):
        before = getattr(parent, field)
        setattr(parent, field, new if i is None else [*before[:i], new, *before[i + 1 :]])
        source = ast.unparse(trees[file])
        setattr(parent, field, before)
        if source not in seen:
            seen.add(source)
            was, now = (ast.unparse(ast.fix_missing_locations(node)).split("\n")[0] for node in (old, new))
            yield (
                file,
                source,
                f"{file}:{old.lineno}: {texts[file].split(chr(10))[old.lineno - 1].strip()}\n    {was}  ->  {now}",
            )


def run(root, tests, limit):
    """The exit status of tests in a process of its own: 0 if all pass, -SIGALRM after `limit` seconds."""
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        signal.alarm(limit)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1), os.dup2(nowhere, 2), os.chdir(root)
        sys.path[0] = str(root)  # was the checkout
        sys.modules.pop("tests")
        options = ["-x", "-p", "no:cacheprovider", f"--basetemp={root.parent / 'tmp'}"]
        os._exit(pytest.main(options + [f"tests/test_{name}.py" for name in tests]))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.system(f"kill -9 -- -{pid} 2> /dev/null")  # what it has started itself
    return code


def main():
    import tyro

    cfg, slow = tyro.cli(MutantsConfig, description=__doc__), 0
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # one that is as long and as old as another would be taken for it
    sys.dont_write_bytecode = True
    for name in HEAVY:
        importlib.import_module(name)
    left = [mutant for mutant, _ in zip(mutants(random.Random(cfg.seed)), range(cfg.mutants))]
    total = len(left)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"))
        for tests in ROUNDS:
            start, met, left = time.time(), left, []
            assert run(root, tests, limit=1200) == 0, f"{', '.join(tests)}: not all pass as it is"
            limit = 30 + 5 * round(time.time() - start)
            print(f"{len(met)} mutants meet {', '.join(tests)}, each {limit} s at most", flush=True)
            for file, source, change in met:
                (root / file).write_text(source, encoding="utf-8")
                code = run(root, tests, limit)
                shutil.copy(ROOT / file, root / file)
                slow += code == -signal.SIGALRM
                if code == 0:
                    left.append((file, source, change))
                    print(change, flush=True)
    print(f"{total - len(left)} of {total} caught, {slow} of them by time; {len(left)} live")


if __name__ == "__main__":
    main()
