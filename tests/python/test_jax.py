# SPDX-License-Identifier: Apache-2.0
"""flashgrad.jax: beside jax.nn.dot_product_attention, and under JAX's transformations."""

import functools

import flashgrad
import flashgrad.jax as fgj
import jax
import jax.experimental
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from jax.test_util import check_grads

try:
    from jax import shard_map
except ImportError:  # JAX 0.6.0
    from jax.experimental.shard_map import shard_map

jax.config.update("jax_default_device", jax.devices("cpu")[0])  # test_cuda_jax.py has the others

# JAX 0.9 moved it.
enable_x64 = (
    functools.partial(jax.enable_x64, True)
    if hasattr(jax, "enable_x64")
    else jax.experimental.enable_x64
)


def jax_attention(q, k, v, bias=None, mask=None, *, local_window_size=None, **options):
    """JAX's own function. JAX 0.6 takes no notice of a window that comes without a mask."""
    if local_window_size is not None and mask is None:
        mask = jnp.ones((1, 1, q.shape[-3], k.shape[-3]), bool)
    return jax.nn.dot_product_attention(
        q, k, v, bias, mask, local_window_size=local_window_size, **options
    )


def arrays(*shapes, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def qkv(rows=13, keys=17, heads=4, heads_kv=2, batch=2, dtype=jnp.float32):
    return arrays((batch, rows, heads, 8), *[(batch, keys, heads_kv, 8)] * 2, dtype=dtype)


def close(got, want, tolerance=3e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert x.shape == y.shape
        np.testing.assert_allclose(
            np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=0, atol=tolerance
        )


def same(got, want):
    close(got, want, 0)


def value_and_gradients(function, inputs, dout, **options):
    """function's result, and the gradients of its product with dout."""
    out, pullback = jax.vjp(lambda *inputs: function(*inputs, **options), *inputs)
    return out, pullback(dout)


LENGTHS = {
    "query_seq_lengths": jnp.array([13, 5], jnp.int32),
    "key_value_seq_lengths": jnp.array([9, 17], jnp.int32),
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"local_window_size": 3},
        {"local_window_size": (4, 1)},
        {"local_window_size": (4, 2), "is_causal": True},
        {"scale": 0.3},
        LENGTHS,
        {**LENGTHS, "is_causal": True},
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_matches_jax(options, jitted):
    inputs = qkv()
    (dout,) = arrays((2, 13, 4, 8), seed=1)
    lengths = {name: x for name, x in options.items() if name in LENGTHS}
    rest = {name: x for name, x in options.items() if name not in LENGTHS}

    def run(function):
        def both(inputs, dout, lengths):
            return value_and_gradients(function, inputs, dout, **lengths, **rest)

        return (jax.jit(both) if jitted else both)(inputs, dout, lengths)

    close(run(fgj.dot_product_attention), run(jax_attention))


@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 6e-2), (jnp.float16, 1e-2)])
def test_half_precision(dtype, tolerance):
    inputs = qkv(dtype=dtype)
    (dout,) = arrays((2, 13, 4, 8), dtype=dtype, seed=1)
    got = value_and_gradients(fgj.dot_product_attention, inputs, dout, is_causal=True)
    assert all(x.dtype == dtype for x in jax.tree.leaves(got))
    wide = [x.astype(jnp.float32) for x in inputs]
    want = value_and_gradients(jax_attention, wide, dout.astype(jnp.float32), is_causal=True)
    close(got, want, tolerance)


def test_without_batch_and_residual():
    q, k, v = (x[0] for x in qkv())
    out, lse = fgj.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    assert out.shape == (13, 4, 8) and lse.shape == (13, 4) and lse.dtype == q.dtype
    close(out, jax_attention(q, k, v, is_causal=True))
    k = jnp.repeat(k, 2, axis=1)
    s = jnp.einsum("tnh,snh->tns", q, k) / np.sqrt(8)
    s = jnp.where(jnp.tri(13, 17, dtype=bool)[:, None], s, -jnp.inf)
    close(lse, jax.nn.logsumexp(s, axis=-1))


def test_masks_that_are_bands():
    q, k, v = qkv()
    causal = np.tril(np.ones((13, 17), bool))
    same(
        fgj.dot_product_attention(q, k, v, mask=causal),
        fgj.dot_product_attention(q, k, v, is_causal=True),
    )
    band = np.tri(13, 17, 4, bool) & ~np.tri(13, 17, -3, bool)
    masks = [band, band[None, None], np.broadcast_to(band, (2, 4, 13, 17)), jnp.asarray(band)]
    for mask in masks:
        close(
            fgj.dot_product_attention(q, k, v, mask=mask, is_causal=True),
            jax_attention(q, k, v, mask=jnp.asarray(mask), is_causal=True),
        )
    # A constant of a jitted function is known; its argument is not.
    want = jax_attention(q, k, v, mask=jnp.asarray(band))
    close(jax.jit(lambda q: fgj.dot_product_attention(q, k, v, mask=band))(q), want)
    assert not fgj.dot_product_attention(q, k, v, mask=np.zeros((13, 17), bool)).any()


def test_refused_masks_and_biases():
    q, k, v = qkv()
    band = np.tril(np.ones((13, 17), bool))
    holes = band.copy()
    holes[7, 3] = False
    per_sequence = np.stack([band, np.ones_like(band)])[:, None]
    for mask in (holes, per_sequence):
        with pytest.raises(NotImplementedError, match="mask: of another form"):
            fgj.dot_product_attention(q, k, v, mask=mask)
    with pytest.raises(NotImplementedError, match="content is not known"):
        jax.jit(lambda mask: fgj.dot_product_attention(q, k, v, mask=mask))(band)
    with pytest.raises(NotImplementedError, match="mask: of dtype float32"):
        fgj.dot_product_attention(q, k, v, mask=band.astype(np.float32))
    with pytest.raises(ValueError, match=r"mask: shape \(5, 5\)"):
        fgj.dot_product_attention(q, k, v, mask=np.ones((5, 5), bool))
    with pytest.raises(NotImplementedError, match="bias"):
        fgj.dot_product_attention(q, k, v, jnp.zeros((1, 1, 13, 17)))


def test_implementation_of_jax():
    q, k, v = qkv()
    bias = jnp.linspace(0, 1, 13 * 17).reshape(1, 1, 13, 17)
    same(
        fgj.dot_product_attention(q, k, v, bias, implementation="xla"),
        jax_attention(q, k, v, bias, implementation="xla"),
    )


OPTIONS = [
    {},
    {"causal": True},
    {"window": (5, 3), "alignment": "top-left"},
    {"window": (-1, 4), "softcap": 1.5, "scale": -0.3},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_same_bits_as_numpy(options, with_sinks):
    q, k, v = qkv()
    sinks, dout, dlse = arrays((4,), (2, 13, 4, 8), (2, 4, 13), seed=1)
    inputs = (q, k, v, sinks) if with_sinks else (q, k, v)

    def run(q, k, v, sinks=None):
        return fgj.attention(q, k, v, sinks=sinks, **options)

    got, pullback = jax.vjp(run, *inputs)
    q, k, v, dout_, dlse_, sinks_ = (np.asarray(x) for x in (q, k, v, dout, dlse, sinks))
    if with_sinks:
        options = {**options, "sinks": sinks_}
    want = flashgrad.forward(q, k, v, **options)
    same(got, want)
    same(pullback((dout, dlse)), flashgrad.backward(dout_, q, k, v, *want, dlse=dlse_, **options))


@pytest.mark.parametrize("options", OPTIONS)
def test_check_grads(options):
    with enable_x64():
        inputs = (*qkv(5, 7, dtype=jnp.float64), *arrays((4,), dtype=jnp.float64, seed=2))

        def run(q, k, v, sinks):
            return fgj.attention(q, k, v, sinks=sinks, **options)

        assert all(x.dtype == jnp.float64 for x in run(*inputs))
        check_grads(run, inputs, order=1, modes=["rev"])


def test_check_grads_in_float32():
    check_grads(
        lambda *x: fgj.dot_product_attention(*x, is_causal=True),
        qkv(5, 7), order=1, modes=["rev"], atol=1e-2, rtol=1e-2,
    )  # fmt: skip


def test_double_backward_is_refused():
    q, k, v = qkv()

    def loss(q):
        return fgj.attention(q, k, v)[0].sum()

    with pytest.raises(NotImplementedError, match="double backward"):
        jax.grad(lambda q: jax.grad(loss)(q).sum())(q)


@pytest.mark.parametrize("inner", [lambda f: f, jax.jit], ids=["alone", "jit"])
def test_a_value_beside_gradients_is_differentiable(inner):
    """What the outer grad sees is the inner one's value, not its gradients."""
    q, k, v = qkv()

    def value(attend, q):
        return inner(jax.value_and_grad(lambda k: (attend(q, k, v) ** 2).sum()))(k)[0]

    got, want = (
        jax.grad(lambda q: value(attend, q))(q)
        for attend in (fgj.dot_product_attention, jax.nn.dot_product_attention)
    )
    close(got, want)


def test_packed_sequences_and_offsets():
    q, k, v, dout = arrays((12, 4, 8), *[(19, 2, 8)] * 2, (12, 4, 8))
    cu_q, cu_kv = jnp.array([0, 5, 5, 12], jnp.int32), jnp.array([0, 9, 12, 19], jnp.int32)
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}

    def run(lengths, offset, q, k, v):
        return fgj.attention(
            q, k, v, causal=True, max_seqlen_q=7, max_seqlen_kv=9, q_offset=offset, **lengths
        )[0]

    offset = jnp.array([1, 0, -2], jnp.int32)
    for q_offset in (None, offset):
        out, pullback = jax.vjp(lambda *x: run(lengths, q_offset, *x), q, k, v)
        host = {name: np.asarray(x) for name, x in lengths.items()}
        if q_offset is not None:
            host["q_offset"] = np.asarray(q_offset, np.int64)
        arguments = [np.asarray(x) for x in (q, k, v)]
        want, lse = flashgrad.forward(*arguments, causal=True, **host)
        same(out, want)
        gradients = flashgrad.backward(np.asarray(dout), *arguments, want, lse, causal=True, **host)
        same(pullback(dout), gradients)
    with enable_x64():
        wide = np.asarray([1, 0, -2], np.int64)
        same(run(lengths, jnp.asarray(wide), q, k, v), run(lengths, offset, q, k, v))
    with pytest.raises(ValueError, match="q_offset: dtype float32"):
        run(lengths, jnp.ones(3), q, k, v)
    bad = {**lengths, "cu_seqlens_q": jnp.array([0, 5, 4, 12], jnp.int32)}
    with pytest.raises(jax.errors.JaxRuntimeError, match="cu_seqlens_q"):
        jax.block_until_ready(run(bad, None, q, k, v))


def test_offsets_beyond_32_bits():
    q, k, v = qkv()
    batch = q.shape[0]
    far = np.full(batch, 2**31 + 5)  # every key lies before it
    want = fgj.attention(q, k, v)[0]
    run = functools.partial(fgj.attention, q, k, v, causal=True)
    same(run(q_offset=jnp.asarray(far, jnp.uint32))[0], want)
    with enable_x64():
        same(run(q_offset=far)[0], want)
    with pytest.raises(ValueError, match="q_offset: entries that are no int32"):
        run(q_offset=far)
    with pytest.raises(ValueError, match="seqused_kv: entries that are no int32"):
        run(seqused_kv=np.full(batch, 2**32))


def test_exported_programs():
    q, k, v = (jnp.asarray(x) for x in arrays((1, 9, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8)))
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(f"flashgrad_{x}") for x in ("cpu", "cuda")
    ]
    function = jax.jit(jax.grad(lambda q: fgj.attention(q, k, v, causal=True)[0].sum()))
    for platforms in (["cpu"], ["cpu", "cuda"]):
        exported = jax.export.export(function, disabled_checks=checks, platforms=platforms)(q)
        assert jnp.array_equal(exported.call(q), function(q))


def test_symbolic_shapes_are_refused():
    shape = jax.export.symbolic_shape("b, 9, 2, 8")
    with pytest.raises(NotImplementedError, match=r"shape \(b, 9, 2, 8\), want numbers"):
        jax.export.export(jax.jit(fgj.attention))(*[jax.ShapeDtypeStruct(shape, jnp.float32)] * 3)


def test_options_may_be_arrays():
    q = jnp.ones((9, 2, 8))
    cu = jnp.array([0, 9], jnp.int32)
    packed = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    got = fgj.attention(q, q, q, window=(jnp.int32(3), 0), max_seqlen_q=jnp.int32(9), **packed)
    want = fgj.attention(q, q, q, window=(3, 0), max_seqlen_q=9, **packed)
    assert all(map(jnp.array_equal, got, want))


def test_traced_options_are_refused():
    q, k, v = qkv()
    for function, name, value in (
        (fgj.attention, "scale", 0.5),
        (fgj.attention, "softcap", 0.5),
        (fgj.attention, "causal", True),
        (fgj.attention, "window", (1, 0)),
        (fgj.attention, "window", jnp.array([1, 0])),
        (fgj.attention, "alignment", 0),
        (fgj.attention, "max_seqlen_q", 13),
        (fgj.attention, "deterministic", True),
        (fgj.dot_product_attention, "scale", 0.5),
        (fgj.dot_product_attention, "is_causal", True),
        (fgj.dot_product_attention, "local_window_size", 3),
        (fgj.dot_product_attention, "return_residual", True),
    ):
        with pytest.raises(NotImplementedError, match=f"{name}: an argument of a transformed"):
            jax.jit(lambda x: function(q, k, v, **{name: x}))(value)  # noqa: B023
    same(
        fgj.dot_product_attention(q, k, v, scale=jnp.float32(0.5)),
        fgj.dot_product_attention(q, k, v, scale=0.5),
    )


def test_errors_of_the_library():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="k: dtype bf16, want f32"):
        fgj.attention(q, k.astype(jnp.bfloat16), v)
    with pytest.raises(ValueError, match="v: "):
        jax.jit(fgj.attention)(q, k, v[:, :3])
    with pytest.raises(NotImplementedError, match="q: dtype i32"):
        fgj.attention(q.astype(jnp.int32), k, v)
    with pytest.raises(ValueError, match="alignment"):
        fgj.attention(q, k, v, alignment="left")
    same(
        fgj.dot_product_attention(q, k, v, local_window_size=np.int64(2)),
        fgj.dot_product_attention(q, k, v, local_window_size=(2, 2)),
    )
    with pytest.raises(ValueError, match="local_window_size: .*, want a whole number or"):
        fgj.dot_product_attention(q, k, v, local_window_size=(1, 2, 3))
    with pytest.raises(ValueError, match="local_window_size: 1.5, want"):
        fgj.dot_product_attention(q, k, v, local_window_size=1.5)
    same(
        fgj.dot_product_attention(q, k, v, local_window_size=np.int32(3)),
        fgj.dot_product_attention(q, k, v, local_window_size=(3, 3)),
    )
    with pytest.raises(ValueError, match="query: 2 dimensions"):
        fgj.dot_product_attention(q[0, 0], k, v)
    with pytest.raises(TypeError, match="q: a NoneType, want an array"):
        fgj.attention(None, k, v)
    with pytest.raises(TypeError, match="key: a str, want an array"):
        fgj.dot_product_attention(q, "k", v)


def each(function, axes, *inputs):
    """What vmap means: function at each index of the first axis, stacked."""
    count = next(x.shape[0] for x, axis in zip(inputs, axes) if axis == 0)
    results = [
        function(*(x if axis is None else x[i] for x, axis in zip(inputs, axes)))
        for i in range(count)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *results)


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, None, None, None), (None, 0, 0, 0)])
@pytest.mark.parametrize("sinks", ["none", "shared", "mapped"])
def test_vmap(axes, sinks):
    shapes = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (2, 5, 4, 8))
    inputs = arrays(*((3, *s) if axis == 0 else s for s, axis in zip(shapes, axes)))
    if sinks != "none":
        axes = (*axes, 0 if sinks == "mapped" else None)
        inputs += arrays((3, 4) if sinks == "mapped" else (4,), seed=1)

    def run(q, k, v, dout, sinks=None):
        def attend(q, k, v, sinks):
            return fgj.attention(q, k, v, sinks=sinks, causal=True)[0]

        out, pullback = jax.vjp(attend, q, k, v, sinks)
        return out, pullback(dout)[: 3 if sinks is None else 4]

    close(jax.vmap(run, axes)(*inputs), each(run, axes, *inputs), 1e-6)
    nested = jax.vmap(jax.vmap(run, axes), [0] * len(axes))
    doubled = [jnp.stack([x, 2 * x]) for x in inputs]
    for half, want in zip(range(2), (inputs, [2 * x for x in inputs])):
        got = jax.tree.map(lambda x: x[half], nested(*doubled))
        close(got, each(run, axes, *want), 1e-6)


def test_gradient_of_what_vmap_shares():
    q, k, v = arrays((3, 2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))

    def loss(attend, k):
        return (jax.vmap(lambda q: attend(q, k, v))(q) ** 2).sum()

    got, want = (
        jax.grad(lambda k: loss(f, k))(k) for f in (fgj.dot_product_attention, jax_attention)
    )
    close(got, want, 1e-4)


def test_vmap_of_packed_sequences():
    q, k, v = arrays((3, 12, 4, 8), *[(3, 12, 2, 8)] * 2)
    cu = jnp.array([[0, 5, 12], [0, 1, 12], [0, 12, 12]], jnp.int32)

    def run(q, k, v, cu):
        return fgj.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu)[0]

    same(jax.vmap(run)(q, k, v, cu), each(run, [0] * 4, q, k, v, cu))


@pytest.mark.parametrize("spec", [PartitionSpec("i"), PartitionSpec(None, None, "i")])
def test_shard_map(spec):
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("i",))
    inputs = qkv()
    (dout,) = arrays((2, 13, 4, 8), seed=1)

    def run(*inputs):
        *inputs, dout = inputs
        out, pullback = jax.vjp(lambda *x: fgj.dot_product_attention(*x, is_causal=True), *inputs)
        return out, *pullback(dout)

    sharded = shard_map(run, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 4)
    want = run(*inputs, dout)
    for function in (sharded, jax.jit(sharded)):
        got = function(*inputs, dout)
        assert len(got[0].sharding.device_set) == 2
        same(got, want)

    def loss(*inputs):
        attend = shard_map(
            lambda *x: fgj.dot_product_attention(*x, is_causal=True),
            mesh=mesh, in_specs=(spec,) * 3, out_specs=spec,
        )  # fmt: skip
        return (attend(*inputs) * dout).sum()

    same(jax.jit(jax.grad(loss, (0, 1, 2)))(*inputs), want[1:])


def test_shard_map_with_shared_keys():
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("i",))
    q, k, v = qkv()
    k, v = k[:1], v[:1]
    spec = PartitionSpec("i")

    def loss(attend, *inputs):
        attend = shard_map(
            attend, mesh=mesh, in_specs=(spec, PartitionSpec(), PartitionSpec()), out_specs=spec
        )
        return (attend(*inputs) ** 2).sum()

    got, want = (
        jax.grad(lambda *x: loss(f, *x), (0, 1, 2))(q, k, v)
        for f in (fgj.dot_product_attention, jax_attention)
    )
    close(got, want, 1e-4)


def test_checkpoint_and_scan():
    q, k, v = qkv()

    def loss(attend, q):
        def layer(x, _):
            return attend(x, k, v), None

        return jax.lax.scan(jax.checkpoint(layer), q, None, 3)[0].sum()

    got, want = (
        jax.grad(lambda q: loss(f, q))(q) for f in (fgj.dot_product_attention, jax_attention)
    )
    close(got, want)


def test_empty_tensors():
    q, k, v = qkv(rows=3, keys=0)
    assert not fgj.attention(q, k, v)[0].any()
    q, k, v = qkv(rows=0, keys=3)
    out, pullback = jax.vjp(lambda *x: fgj.attention(*x)[0], q, k, v)
    assert out.shape == (2, 0, 4, 8)
    assert not any(x.any() for x in pullback(out))
    x = jnp.zeros((0, 2, 9, 4, 8))  # a mapped axis without elements
    over = jax.vmap(lambda x: fgj.attention(x, x, x)[0])
    out, pullback = jax.vjp(over, x)
    assert out.shape == pullback(out)[0].shape == x.shape
