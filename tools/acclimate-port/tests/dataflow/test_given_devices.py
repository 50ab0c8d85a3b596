"""A device that is given to a function of the file is followed to where it is used."""

import textwrap

import pytest

from porting import EACH_TARGET, ported_once_for_all

FOLLOWED = [
    """
    def load(path, where):
        return torch.load(path, map_location=where)

    load("a", "cuda")
    """,
    """
    def load(path, where="cuda"):
        return torch.load(path, map_location=where)
    """,
    """
    def load(path, *, where):
        return torch.load(path, map_location=where)

    load("a", where="cuda")
    """,
    """
    def inner(x, loc):
        return x.to(loc)

    def outer(x, on):
        return inner(x, loc=on)

    outer(1, "cuda")
    """,
    """
    class Loader:
        def __init__(self, path, d):
            self.x = torch.zeros(3, device=d)

    Loader("a", "cuda")
    """,
    """
    class Loader:
        def get(self, path, d):
            return torch.zeros(3, device=d)

    def f(loader):
        return loader.get("a", "cuda")
    """,
    """
    class Loader:
        @staticmethod
        def get(path, d):
            return torch.zeros(3, device=d)

    def f():
        return Loader.get("a", "cuda")
    """,
    """
    def load(x, where):
        if where == "cuda":
            x = x.float()
        return x.to(where)
    """,
]


@EACH_TARGET
@pytest.mark.parametrize("lines", FOLLOWED)
def test_a_device_that_a_function_puts_things_on_is_ported_where_it_is_given(lines: str, target: str) -> None:
    text = ported_once_for_all("import torch\n" + textwrap.dedent(lines), target)
    assert '"cuda"' not in text


STAY = [
    """
    def load(name, where):
        return torch.zeros(3), names[where]

    load("a", "cuda")
    """,
    """
    class One:
        def get(self, d):
            return torch.zeros(3, device=d)

    class Other:
        def get(self, d):
            return {d: torch.zeros(3)}

    def f(x):
        return x.get("cuda")
    """,
]


@EACH_TARGET
@pytest.mark.parametrize("lines", STAY)
def test_what_a_function_uses_as_data_stays(lines: str, target: str) -> None:
    source = "import torch\n" + textwrap.dedent(lines)
    assert ported_once_for_all(source, target) == source


NONE = [
    "if args.gpu is not None:\n    print(args.gpu)\nreturn x.cuda(args.gpu, non_blocking=True)",
    "parser.add_argument('--gpu', type=int)\nargs = parser.parse_args()\nreturn x.cuda(args.gpu)",
    "parser.add_argument('--gpu', default=None, type=int)\nreturn x.cuda(args.gpu)",
    "return x.cuda(gpu)",
]


@pytest.mark.parametrize("lines", NONE)
def test_a_number_that_may_be_none_still_means_the_current_device(lines: str) -> None:
    source = f"import torch\n\n\ndef f(x, args, parser, gpu=None):\n{textwrap.indent(lines, '    ')}\n"
    name = "args.gpu" if "args" in lines else "gpu"
    text = ported_once_for_all(source, "torch")
    assert f'x.to(accelerator_type() if {name} is None else f"{{accelerator_type()}}:{{{name}}}"' in text


NOT_NONE = [
    "if args.gpu is not None:\n    return x.cuda(args.gpu)",
    "if args.gpu is None:\n    return x\nelse:\n    return x.cuda(args.gpu)",
    "parser.add_argument('--gpu', default=0, type=int)\nreturn x.cuda(args.gpu)",
    "return x.cuda(args.gpu)",
]


@pytest.mark.parametrize("lines", NOT_NONE)
def test_a_number_that_is_there_becomes_a_device_as_it_is(lines: str) -> None:
    source = f"import torch\n\n\ndef f(x, args, parser):\n{textwrap.indent(lines, '    ')}\n"
    assert 'x.to(f"{accelerator_type()}:{args.gpu}")' in ported_once_for_all(source, "torch")
