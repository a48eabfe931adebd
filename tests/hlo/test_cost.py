"""What programs cost: small ones that XLA compiles for this host, and texts as XLA writes them for others."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_tx.hlo.cost import cost_of
from spmd_tx.hlo.hints import USUALLY_FALSE, costs, usual_turns


def compiled(function, *shapes, **options) -> str:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function, **options).lower(*arguments).compile().as_text()


def module(body: str, *others: str) -> str:
    return "\n".join(["HloModule text, num_partitions=8", *others, f"ENTRY %main () -> f32[] {{{body}}}\n"])


def test_a_product_in_a_loop_counts_as_often_as_it_runs():
    def run(x, weights):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    cost = cost_of(compiled(run, (8, 64), (7, 64, 32 * 2)))
    assert cost.flops == 7 * 2 * 8 * 64 * 64
    assert not cost.unknown_loops
    assert cost.bytes >= 7 * 64 * 64 * 4


def test_loops_in_loops_multiply():
    def run(x):
        return lax.fori_loop(0, 3, lambda _, y: lax.fori_loop(0, 5, lambda _, z: jnp.tanh(z @ z), y), x)

    assert cost_of(compiled(run, (16, 16))).flops == 15 * 2 * 16**3


def test_a_loop_whose_end_depends_on_data_counts_once():
    def run(x):
        return lax.while_loop(lambda y: jnp.sum(y) < 1e6, lambda y: y @ y, x)

    cost = cost_of(compiled(run, (16, 16)))
    assert cost.flops == 2 * 16**3
    assert len(cost.unknown_loops) == 1
    assert cost.turns == 1


def test_the_dearest_loop_tells_how_many_steps_a_program_takes():
    def run(x):
        y = lax.fori_loop(0, 7, lambda _, y: jnp.sin(y), x)
        return lax.fori_loop(0, 3, lambda _, y: lax.fori_loop(0, 5, lambda _, z: jnp.tanh(z @ z), y), y)

    assert cost_of(compiled(run, (64, 64))).turns == 3


def test_a_loop_of_data_inside_a_counted_one_is_no_outer_one():
    def run(x):
        inner = partial(lax.while_loop, lambda y: jnp.sum(y) < 1e6, lambda y: y @ y)
        return lax.fori_loop(0, 4, lambda _, y: inner(jnp.tanh(y)), x)

    cost = cost_of(compiled(run, (16, 16)))
    assert cost.unknown_loops
    assert cost.turns == 4
    assert cost.flops == 4 * 2 * 16**3


def test_of_the_branches_of_a_condition_the_dearest_counts():
    def run(x):
        return lax.cond(jnp.sum(x) > 0, lambda y: jnp.tanh(y @ y) @ y, lambda y: y @ y, x)

    assert cost_of(compiled(run, (16, 16))).flops == 2 * 2 * 16**3


# Sizes of their own, because a cache of compiled programs does not look at names.
@pytest.mark.parametrize("scope, size", [(USUALLY_FALSE, 24), ("another", 40)])
@pytest.mark.parametrize("dearest", [False, True])
def test_of_a_condition_that_is_usually_false_that_branch_counts(scope, size, dearest):
    branches = (lambda y: jnp.tanh(y @ y) @ y), (lambda y: y @ y)

    def run(x):
        with jax.named_scope(scope):
            return lax.cond(jnp.sum(x) > 0, *(branches if dearest else reversed(branches)), x)

    products = 1 if scope == USUALLY_FALSE and dearest else 2
    assert cost_of(compiled(run, (size, size))).flops == products * 2 * size**3


def test_the_false_branch_is_found_where_the_condition_is_a_number_or_a_truth_value():
    computations = (
        "%yes (p: f32[64]) -> f32[64] {\n  %p = f32[64] parameter(0)\n  ROOT %n = f32[64] sine(%p)\n}",
        "%no (p: f32[64]) -> f32[64] {\n  %p = f32[64] parameter(0)\n  ROOT %n = f32[64] negate(%p)\n}",
    )
    for written in (
        "conditional(%c, %x, %x), true_computation=%yes, false_computation=%no",
        "conditional(%i, %x, %x), branch_computations={%no, %yes}",
    ):
        body = f"\n  %x = f32[64] parameter(0)\n  %y = f32[64] {written}, "
        body += f'metadata={{op_name="jit(f)/{USUALLY_FALSE}/cond"}}\n  ROOT %r = f32[64] copy(%y)\n'
        operations = cost_of(module(body, *computations)).operations
        assert [each.op for each in operations] == ["negate", "copy"]


def test_what_is_read_through_a_slice_counts_as_the_slice():
    def run(stack, index):
        return lax.dynamic_index_in_dim(stack, index.astype(jnp.int32)[0], keepdims=False) * 2

    cost = cost_of(compiled(run, (100, 64, 64), (1,)))
    assert 2 * 64 * 64 * 4 <= cost.bytes < 3 * 64 * 64 * 4


def test_what_is_updated_in_place_counts_as_the_update():
    def run(stack, entry):
        return lax.dynamic_update_index_in_dim(stack, entry * 2, 3, 0)

    cost = cost_of(compiled(run, (100, 64, 64), (64, 64), donate_argnums=0))
    assert cost.bytes < 5 * 64 * 64 * 4
    assert not any(("f32", (100, 64, 64)) in each.written for each in cost.operations)


def test_an_update_of_what_somebody_else_needs_copies_it():
    def run(stack, entry):
        return lax.dynamic_update_index_in_dim(stack, entry * 2, 3, 0)

    cost = cost_of(compiled(run, (100, 64, 64), (64, 64)))
    assert cost.bytes >= 2 * 100 * 64 * 64 * 4
    assert any(("f32", (100, 64, 64)) in each.written for each in cost.operations)


def test_sorts_are_counted_from_a_size_on():
    assert [each.sorted_numbers for each in cost_of(compiled(jnp.sort, (8192,))).sorts] == [8192]
    assert not cost_of(compiled(jnp.sort, (64,))).sorts


def test_collectives_of_a_mesh():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))

    @partial(jax.shard_map, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a"), check_vma=False)
    def run(x):
        whole = lax.all_gather(x, "b", axis=1, tiled=True)
        return lax.psum(whole * 2, "b")

    cost = cost_of(compiled(run, (16, 64)))
    found = {each.collective.name: each.collective for each in cost.collectives if each.collective}
    gathered, summed = found["all-gather"], found["all-reduce"]
    assert gathered.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert gathered.bytes == summed.bytes == 8 * 64 * 4
    assert gathered.sent_bytes == 3 / 4 * gathered.bytes
    assert summed.sent_bytes == 2 * 3 / 4 * summed.bytes


GROUPS = [
    ("replica_groups={{0,2},{1,3}}", ((0, 2), (1, 3))),
    ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'c','a'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
    ("replica_groups=mesh['a'=8,'b'=1] {'b','a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ("replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ("replica_groups=mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'b'}", ((7, 6, 5, 4), (3, 2, 1, 0))),
    ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
    ("replica_groups={}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
]


@pytest.mark.parametrize("written, groups", GROUPS)
def test_groups_of_devices(written, groups):
    text = module(
        f"\n%x = f32[4]{{0}} parameter(0)\nROOT %y = f32[4]{{0}} all-reduce(%x), {written}, to_apply=%add\n"
    )
    (found,) = cost_of(text).collectives
    assert found.collective is not None
    assert found.collective.groups == groups


@pytest.mark.parametrize("is_sync", [True, False])
def test_a_gather_that_begins_and_ends_is_one_collective(is_sync):
    config = f'backend_config={{"collective_backend_config":{{"is_sync":{str(is_sync).lower()}}}}}'
    text = module(
        f"""
%x = f32[4]{{0}} parameter(0)
%begun = (f32[4]{{0}}, f32[32]{{0}}) all-gather-start(%x), replica_groups=[1,8]<=[8], {config}
ROOT %done = f32[32]{{0}} all-gather-done(%begun)
"""
    )
    (found,) = cost_of(text).collectives
    assert found.collective is not None
    assert found.collective.bytes == 32 * 4
    assert found.collective.is_asynchronous != is_sync


def test_a_product_that_is_written_as_a_convolution():
    """TPUs write a product of matrices so, and one of several pairs of them with the pairs as a window."""
    product = "%y = f32[8,16]{1,0} convolution(%a, %b), dim_labels=bf_io->bf"
    inputs = "%a = f32[8,32]{1,0} parameter(0)\n%b = f32[32,16]{1,0} parameter(1)\n"
    assert cost_of(module(f"\n{inputs}ROOT {product}\n")).flops == 2 * 8 * 32 * 16
    several = (
        "%a = f32[5,8,32]{2,1,0} parameter(0)\n%b = f32[5,32,16]{2,1,0} parameter(1)\n"
        "ROOT %y = f32[5,8,16]{2,1,0} convolution(%a, %b), "
        "window={size=5 stride=4 pad=0_0 lhs_dilate=5}, dim_labels=0bf_0io->0bf"
    )
    assert cost_of(module(f"\n{several}\n")).flops == 5 * 2 * 8 * 32 * 16


def test_products_and_attention_of_nvidias_libraries():
    gemm = (
        "%a = bf16[8,32]{1,0} parameter(0)\n%b = bf16[32,16]{1,0} parameter(1)\n"
        'ROOT %y = (bf16[8,16]{1,0}, s8[9]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    )
    assert cost_of(module(f"\n{gemm}\n")).flops == 2 * 8 * 32 * 16
    attention = (
        "%q = bf16[2,64,8,128]{3,2,1,0} parameter(0)\n%k = bf16[2,64,8,128]{3,2,1,0} parameter(1)\n"
        "%v = bf16[2,64,8,128]{3,2,1,0} parameter(2)\n"
        "ROOT %y = (bf16[2,8,64,128]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %v), "
        'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"mask_type":"PADDING_CAUSAL"}'
    )
    assert cost_of(module(f"\n{attention}\n")).flops == 2 * 2 * 2 * 8 * 64 * 64 * 128 / 2


def test_a_kernel_may_say_what_it_costs():
    kernel = (
        "%x = f32[1024]{0} parameter(0)\n"
        'ROOT %y = f32[1024]{0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config='
        '{"custom_call_config":{"cost_estimate":{"flops":"500","transcendentals":"0","bytes_accessed":"64"}}}'
    )
    cost = cost_of(module(f"\n{kernel}\n"))
    assert (cost.flops, cost.bytes, cost.launches) == (500, 64, 1)


def test_what_a_kernel_finds_and_leaves_on_the_chip_is_not_moved():
    """If its estimate counts all of it: here queries, which it gets twice, keys, results and ten pages."""
    chip, memory, row = "{1,0:T(8,128)(2,1)S(1)}", "{1,0:T(8,128)(2,1)}", 128 * 2
    counted = (64 + 32 + 64 + 10) * row
    estimate = f'{{"cost_estimate":{{"flops":"500","transcendentals":"0","bytes_accessed":"{counted}"}}}}'

    def moved(scope):
        source = f"jit(step)/while/body/closed_call/{scope}paged_attention/pallas_call"
        kernel = (
            f"%q = bf16[64,128]{chip} parameter(0)\n%k = bf16[32,128]{memory} parameter(1)\n"
            f"%pages = bf16[999,128]{memory} parameter(2)\nROOT %y = bf16[64,128]{chip} "
            f'custom-call(%q, %q, %k, %pages), custom_call_target="tpu_custom_call", '
            f'metadata={{op_name="{source}"}}, backend_config={{"custom_call_config":{estimate}}}'
        )
        return cost_of(module(f"\n{kernel}\n")).bytes

    assert moved("counts_arrays/") == (32 + 10) * row
    assert moved("") == counted


def test_a_prefetch_reads_a_part_and_copies_nothing():
    prefetch = """
%x = f32[4,64]{1,0} parameter(0)
%begun = ((f32[4,64]{1,0}), f32[1,64]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:1], [0:64]}
ROOT %done = f32[1,64]{1,0:S(1)} slice-done(%begun)
"""
    cost = cost_of(module(prefetch))
    assert cost.bytes == 64 * 4
    assert not any(each.written for each in cost.operations)


LAYER_OF_STACK = """
%slice (stack: f32[36,64,32], layer: s32[]) -> f32[1,64,32] {
  %stack = f32[36,64,32]{2,1,0} parameter(0)
  %layer = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice.1 = f32[1,64,32] dynamic-slice(%stack, %layer, %zero, %zero), dynamic_slice_sizes={1,64,32}
}
"""


def test_a_slice_that_a_fusion_begins_counts_as_the_slice():
    """As newer XLA writes it for GPUs, which copy a layer out of its stack beside other work."""
    body = """
%x = f32[36,64,32]{2,1,0} parameter(0)
%n = s32[] parameter(1)
%begun = ((f32[36,64,32]{2,1,0}, s32[]), f32[1,64,32]{2,1,0}, u32[]) fusion-start(%x, %n), calls=%slice
%going = ((f32[36,64,32]{2,1,0}, s32[]), f32[1,64,32]{2,1,0}, u32[]) fusion-update(%begun)
ROOT %done = f32[1,64,32]{2,1,0} fusion-done(%going)
"""
    (found,) = cost_of(module(body, LAYER_OF_STACK)).operations
    assert (found.read_bytes, found.written_bytes) == (64 * 32 * 4 + 4, 64 * 32 * 4)
    assert found.written == (("f32", (1, 64, 32)),)


def test_a_fusion_that_nobody_traced_belongs_to_what_gives_its_result():
    fused = LAYER_OF_STACK.replace(
        "sizes={1,64,32}", 'sizes={1,64,32}, metadata={op_name="f/a" stack_frame_id=2}'
    )
    fused = fused.replace("%zero = s32[] constant(0)", '%zero = s32[] constant(0), metadata={op_name="f/b"}')
    body = """
%x = f32[36,64,32]{2,1,0} parameter(0)
%n = s32[] parameter(1)
ROOT %y = f32[1,64,32]{2,1,0} fusion(%x, %n), kind=kCustom, calls=%slice, metadata={}
"""
    for own, wanted in (("", ("f/a", 2)), ('op_name="f/c" stack_frame_id=7', ("f/c", 7))):
        (found,) = cost_of(module(body.replace("metadata={}", f"metadata={{{own}}}"), fused)).operations
        assert (found.source, found.frame) == wanted


def test_a_product_that_a_fusion_begins_counts_as_the_product():
    product = """
%product (a: f32[8,32], b: f32[32,16]) -> f32[8,16] {
  %a = f32[8,32]{1,0} parameter(0)
  %b = f32[32,16]{1,0} parameter(1)
  ROOT %dot = f32[8,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    body = """
%x = f32[8,32]{1,0} parameter(0)
%y = f32[32,16]{1,0} parameter(1)
%begun = ((f32[8,32]{1,0}, f32[32,16]{1,0}), f32[8,16]{1,0}, u32[]) KIND-start(%x, %y), KEY=%product
ROOT %done = f32[8,16]{1,0} KIND-done(%begun)
"""
    for kind, key in (("fusion", "calls"), ("call", "to_apply"), ("async", "calls")):
        cost = cost_of(module(body.replace("KIND", kind).replace("KEY", key), product))
        assert (cost.flops, cost.launches) == (2 * 8 * 32 * 16, 1)
        assert cost.bytes == (8 * 32 + 32 * 16 + 8 * 16) * 4


# What is begun, what it takes and gives, and the bytes of the collective.
BEGUN = [
    ("(f32[4]{0}, f32[32]{0})", "all-gather", "%x", 32 * 4),
    ("((f32[4]{0}, f32[4]{0}), (f32[32]{0}, f32[32]{0}))", "all-gather", "%x, %x", 2 * 32 * 4),
    ("((f32[4]{0:T(128)}), f32[32]{0:T(128)S(1)}, u32[])", "all-gather", "%x", 32 * 4),
    ("((f32[32]{0}), f32[4]{0}, u32[])", "reduce-scatter", "%y", 32 * 4),
    ("((f32[32]{0}), f32[32]{0})", "all-to-all", "%y", 32 * 4),
    ("(f32[32]{0}, f32[32]{0}, u32[], u32[])", "collective-permute", "%y", 32 * 4),
    ("(f32[4]{0}, f32[32]{0})", "all-reduce", "%x, %y", 36 * 4),
    ("((f32[4]{0}, f32[32]{0}), (f32[4]{0}, f32[32]{0}))", "all-reduce", "%x, %y", 36 * 4),
]


@pytest.mark.parametrize("given, name, operands, moved", BEGUN)
def test_the_operands_of_a_collective_that_begins_are_not_its_results(given, name, operands, moved):
    text = f"""
%x = f32[4]{{0}} parameter(0)
%y = f32[32]{{0}} parameter(1)
ROOT %begun = {given} {name}-start({operands}), replica_groups=[1,8]<=[8]
"""
    (found,) = cost_of(module(text)).collectives
    assert found.collective is not None
    assert found.collective.bytes == moved
    assert found.collective.is_asynchronous


def test_equal_parts_of_a_program():
    cost = cost_of(compiled(lambda x: x @ x, (16, 16)))
    assert cost.divided(4).flops == cost.flops / 4


def test_a_collective_that_goes_on_beside_products_counts_once():
    """As TPUs write it: fusions begin, go on with and end a gather, whose buffers they hand on."""
    part = """
%{name} (p.{name}: f32[4], q.{name}: f32[32]) -> f32[32] {{
  %p.{name} = f32[4]{{0}} parameter(0)
  %q.{name} = f32[32]{{0}} parameter(1)
  ROOT %g.{name} = f32[32]{{0}} all-gather(%p.{name}), replica_groups=[1,8]<=[8], dimensions={{0}}
}}
"""
    body = """
%x = f32[4]{0} parameter(0)
%y = f32[32]{0} parameter(1)
%start = (f32[4]{0}, f32[32]{0}, u32[]{:S(2)}) fusion(%x), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%a
%ours = f32[4]{0} get-tuple-element(%start), index=0
%whole = f32[32]{0} get-tuple-element(%start), index=1
%mark = u32[]{:S(2)} get-tuple-element(%start), index=2
ROOT %done = f32[32]{0} fusion(%ours, %whole, %mark), kind=kCustom, output_to_operand_aliasing={{}: (1, {})}, calls=%b
"""  # noqa: E501
    cost = cost_of(module(body, part.format(name="a"), part.format(name="b")))
    (found,) = cost.collectives
    assert found.name == "start"
    assert found.collective is not None
    assert found.collective.is_asynchronous
    assert found.collective.bytes == 32 * 4
    assert cost.bytes <= 2 * 32 * 4


def test_a_loop_of_data_runs_as_often_as_its_author_tells():
    def run(x, count):
        def turn(_, y):
            return lax.while_loop(lambda z: jnp.sum(z) < 1e6, lambda z: z @ z, y)

        with jax.named_scope(usual_turns(4)):
            return lax.fori_loop(0, count[0].astype(jnp.int32), turn, x)

    cost = cost_of(compiled(run, (16, 16), (1,)))
    assert cost.flops == 4 * 2 * 16**3
    assert len(cost.unknown_loops) == 1, "the inner one"


@pytest.mark.parametrize("ending", ["pallas_call", "mpmd_map"], ids=["Triton", "Mosaic GPU"])
@pytest.mark.parametrize("around", ["{}", "transpose(jvp({}))"])
def test_a_kernel_costs_what_its_author_tells(around, ending):
    scope = around.format(costs(123, 456))
    call = (
        '%x = f32[64]{0} parameter(0) ROOT %y = f32[64]{0} custom-call(%x), custom_call_target="kernel", '
        f'metadata={{op_name="jit(f)/{scope}/name/{ending}"}}'
    )
    cost = cost_of(module("\n" + call.replace(" ROOT", "\n ROOT") + "\n"))
    assert (cost.flops, cost.bytes) == (123, 456)
