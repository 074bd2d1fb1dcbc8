#!/usr/bin/env bash
# Guess: in a function under torch.compile, `tensor.note is None` is True for an attribute that is None, of a tensor
# subclass too; at worst the graph breaks there and Python decides.
# What happens: if the class of the tensor (a traceable wrapper whose __torch_function__ is disabled) defines __getattr__,
# no attribute of it is None to torch.compile. Each `is None` is False, also of attributes that Python finds without
# __getattr__, and of attributes of what they hold. The other branch runs, in one graph (fullgraph=True), without an
# error or a warning. Without __getattr__ all is well; a property that raises AttributeError does what __getattr__ was
# there for, and hasattr answers alike.
# Versions: torch 2.11.0 (2.13.0 and 2.14.1 do the same).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.11.0' 'numpy==2.2.6'
cat > "$folder/program.py" <<'PROGRAM'
import torch

print("torch", torch.__version__)


class Wrapper(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner, self.note = inner, None

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


class WithGetattr(Wrapper):
    def __getattr__(self, name):  # called for what Python does not find, so never for `note`
        raise AttributeError(name)


def marked(tensor, x):
    return x + (1 if tensor.note is None else 2)


for cls, expected in ((Wrapper, 1), (WithGetattr, 2)):
    torch._dynamo.reset()
    tensor, x = cls(torch.ones(4)), torch.zeros(1)
    eager = marked(tensor, x).item()
    compiled = torch.compile(marked, backend="eager", fullgraph=True)(tensor, x).item()
    print(f"{cls.__name__}: eager {eager:.0f}, compiled {compiled:.0f}")
    assert eager == 1 and compiled == expected
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
