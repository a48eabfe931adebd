"""The text of HLO: types, instructions, loops."""

import pytest

from spmd_tx.hlo.arrays import HloArray, arrays_of, memory_bytes_of
from spmd_tx.hlo.module import parse

LOOP = """
HloModule loops, num_partitions=4

%body (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %carry = (s32[], f32[8]{0}) parameter(0)
  %number = s32[] get-tuple-element(%carry), index=0
  %values = f32[8]{0} get-tuple-element(%carry), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%number, %one)
  %twice = f32[8]{0} add(%values, %values)
  ROOT %both = (s32[], f32[8]{0}) tuple(%next, %twice)
}

%condition (carry: (s32[], f32[8])) -> pred[] {
  %carry.1 = (s32[], f32[8]{0}) parameter(0)
  %number.1 = s32[] get-tuple-element(%carry.1), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%number.1, %limit), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{0}) tuple(%zero, %x)
  %while = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body, ATTRIBUTES
  ROOT %result = f32[8]{0} get-tuple-element(%while), index=1, metadata={op_name="jit(f)/while"}
}
"""


@pytest.mark.parametrize(
    "text, expected",
    [
        ("bf16[8,128]{1,0:T(8,128)(2,1)}", [HloArray("bf16", (8, 128))]),
        ("f32[]", [HloArray("f32", ())]),
        (
            "(f32[2]{0}, /*index=1*/s32[3]{0:T(128)S(1)})",
            [HloArray("f32", (2,)), HloArray("s32", (3,), space=1)],
        ),
        (
            "((f32[4]{0}), f32[2]{0}, u32[]{:S(2)})",
            [HloArray("f32", (4,)), HloArray("f32", (2,)), HloArray("u32", (), 2)],
        ),
        ("f32[<=8,2]", [HloArray("f32", (8, 2))]),
        ("token[]", [HloArray("token", ())]),
    ],
)
def test_types(text, expected):
    assert list(arrays_of(text)) == expected


@pytest.mark.parametrize(
    "text, size", [("bf16[8,128]", 2048), ("s4[10]", 5), ("pred[3]", 3), ("f8e4m3fn[6]", 6), ("token[]", 0)]
)
def test_sizes(text, size):
    assert sum(array.bytes for array in arrays_of(text)) == size


def test_what_is_on_the_chip_is_not_in_main_memory():
    assert memory_bytes_of("(f32[2]{0:S(1)}, f32[3]{0})") == 12


def test_an_instruction_is_taken_apart():
    module = parse(LOOP)
    root = module.entry.root
    assert (root.name, root.op, root.operands, root.source) == (
        "result",
        "get-tuple-element",
        ("while",),
        "jit(f)/while",
    )
    assert module.devices == 4
    assert module.computations["body"].parameters[0].name == "carry"
    assert [user.name for user, _ in module.entry.uses["zero"]] == ["start"]


@pytest.mark.parametrize(
    "attributes, trips",
    [
        ('backend_config={"known_trip_count":{"n":"7"}}', 7),
        ("backend_config={}", 5),  # from the condition
    ],
)
def test_how_often_a_loop_runs(attributes, trips):
    module = parse(LOOP.replace("ATTRIBUTES", attributes))
    assert module.trips(module.entry.by_name["while"]) == trips


def test_a_loop_whose_end_depends_on_data_has_no_number():
    text = LOOP.replace("%limit = s32[] constant(5)", "%limit = s32[] add(%number.1, %number.1)")
    module = parse(text)
    assert module.trips(module.entry.by_name["while"]) is None


def test_other_texts_are_refused():
    with pytest.raises(ValueError, match="no entry"):
        parse("This is not HLO.")
