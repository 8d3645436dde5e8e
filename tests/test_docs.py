"""Every public name says what it does, with an example, which the doctests run; the README's code runs too."""

import importlib
import inspect
import re
import runpy
from pathlib import Path

import pytest

import tinygrad_gpu as tg

README = Path(__file__).resolve().parents[1] / "README.md"
MODULES = [
    "",
    "autograd",
    "cuda",
    "data",
    "functional",
    "gpt",
    "io",
    "nn",
    "optim",
    "testing",
    "testing.strategies",
    "trainer",
]
AUTOGRAD = ("Function", "enable_grad", "grad", "is_grad_enabled", "no_grad")  # the rest of that module is the engine
OVERRIDDEN = {"forward", "backward"}  # what a subclass gives, described with the class


def names(module):
    """The public names of a module: those that it lists, else those that it defines; of the package itself, all."""
    if module is tg.autograd:
        return AUTOGRAD
    own = [name for name, x in vars(module).items() if module is tg or getattr(x, "__module__", "") == module.__name__]
    return getattr(module, "__all__", [name for name in own if not name.startswith("_")])


def public():
    """Name to object of every public function and class, and of the methods that these define; each under one name."""
    found = {}
    for module in MODULES:
        module = importlib.import_module(f"tinygrad_gpu.{module}".rstrip("."))
        for name in names(module):
            thing = getattr(module, name)
            if not callable(thing):
                continue
            found.setdefault(id(thing), (f"{module.__name__}.{name}", thing, None))
            for method, value in vars(thing).items() if inspect.isclass(thing) else ():
                value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
                documented = inspect.isfunction(value) or isinstance(value, property)
                if documented and not method.startswith("_") and method not in OVERRIDDEN:
                    found.setdefault(id(value), (f"{module.__name__}.{name}.{method}", value, thing))
    return {name: (thing, owner) for name, thing, owner in found.values()}


def example(text):
    """The lines of a docstring's example."""
    return "\n".join(line for line in (text or "").splitlines() if line.lstrip().startswith((">>>", "...")))


NAMES = public()


@pytest.mark.parametrize("name", NAMES)
def test_documented_with_an_example(name):
    """A method's example may be its class's; a property and an exception need none."""
    thing, owner = NAMES[name]
    assert thing.__doc__, f"{name} has no docstring"
    if isinstance(thing, property) or (inspect.isclass(thing) and issubclass(thing, Exception)):
        return
    of_class = owner is not None and f".{thing.__name__}(" in example(owner.__doc__)
    assert example(thing.__doc__) or of_class, f"{name} has no example"


def test_the_names_are_found():
    """Some of each kind, so that the test above cannot pass by finding nothing."""
    expected = {
        "Tensor", "Tensor.gather", "Tensor.grad", "arange", "checkpoint", "where", "autograd.Function.apply",
        "functional.linear_cross_entropy", "nn.Linear", "nn.Module.state_dict", "optim.Optimizer.step",
        "optim.cosine_with_warmup", "gpt.GPT.generate", "testing.gradcheck", "testing.strategies.shapes", "io.save",
        "data.TokenLoader.state_dict", "trainer.Trainer.fit", "cuda.is_available",
    }  # fmt: skip
    assert {f"tinygrad_gpu.{name}" for name in expected} <= NAMES.keys()


@pytest.mark.parametrize(
    "code", re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL), ids=["model", "test of an op"]
)
def test_the_code_of_the_readme_runs(code, capsys, tmp_path):
    script = tmp_path / "readme.py"  # a real file: hypothesis reads the source of the tests that it runs
    script.write_text(code)
    for name, value in runpy.run_path(str(script)).items():
        if name.startswith("test_"):
            value()
    printed = capsys.readouterr().out
    assert not printed or float(printed) < 0.1  # the loss after training
