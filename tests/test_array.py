"""collectives.array: what is taken, what is refused and in which words, and that nothing is "
"copied."""

import array as stdlib_array
import ctypes
import gc
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
from collectives import array
from collectives.errors import ArrayError, ArrayTypeError, UnsupportedError

READ = {"writable": False, "what": "all_reduce: x"}
WRITE = {"writable": True, "what": "all_reduce: x"}
NUMPY_NAMES = [name for name in array.ITEM_SIZES if not name.startswith(("bfloat", "float8"))]


@pytest.mark.parametrize("name", NUMPY_NAMES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3, 4), (0,), (3, 0)])
def test_numpy(name, shape):
    x = np.ones(shape, name)
    v = array.view(x, **WRITE)
    assert (v.pointer, v.count, v.dtype, v.shape) == (x.ctypes.data, x.size, name, shape)
    assert (v.nbytes, v.device, v.readonly, v.kind) == (x.nbytes, "cpu", False, "numpy")
    assert v.owner is x
    like = array.new_like(x, (5, 2))
    assert (like.shape, like.dtype) == ((5, 2), x.dtype)
    assert array.finish(x, like) is like
    assert not array.is_immutable(x)
    assert array.numpy_dtype(name) == x.dtype


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (ml_dtypes.bfloat16, "bfloat16"),
        (ml_dtypes.float8_e4m3fn, "float8_e4m3"),
        (ml_dtypes.float8_e5m2, "float8_e5m2"),
    ],
)
def test_ml_dtypes(dtype, name):
    x = np.ones((3, 2), dtype)
    v = array.view(x, **WRITE)
    assert (v.dtype, v.nbytes, v.pointer) == (name, x.nbytes, x.ctypes.data)
    assert array.dtype_name(dtype) == name == array.dtype_name(x.dtype)
    assert array.numpy_dtype(name) == x.dtype


def test_views_into_arrays():
    x = np.arange(24.0).reshape(4, 6)
    v = array.view(x[1:3], **WRITE)
    assert (v.pointer, v.count) == (x.ctypes.data + 48, 12)
    odd = np.frombuffer(bytearray(33), np.uint8)[1:33].view(np.float64)
    assert array.view(odd, **WRITE).pointer == odd.ctypes.data  # need not be aligned
    longlong = np.ones(3, np.longlong)
    assert array.view(longlong, **READ).dtype == "int64"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda x: x[:, ::2],
            r"all_reduce: x: array has strides \(48, 16\) bytes at shape \(4, 3\); ",
        ),
        (
            lambda x: x.T,
            r"strides \(8, 48\) bytes at shape \(6, 4\) \(Fortran order\); .*ascontiguousarray",
        ),
        (lambda x: x[::-1], r"strides \(-48, 8\)"),
        (lambda x: np.broadcast_to(x[0], (3, 6)), r"strides \(0, 8\)"),
    ],
)
def test_strides_are_refused(make, says):
    x = make(np.arange(24.0).reshape(4, 6))
    with pytest.raises(ArrayError, match=says):
        array.view(x, **READ)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (np.ones(3, ">f4"), r"'>f4' is not in this machine's byte order; .*newbyteorder"),
        (np.zeros(3, np.dtype(ml_dtypes.bfloat16).newbyteorder(">")), "machine's byte order"),
        (np.zeros(3, [("a", "f4"), ("b", "i4")]), r"fields \('a', 'b'\)"),
        (np.array([object()]), "dtype object holds Python objects"),
        (np.zeros(3, "M8[s]"), r"is a date or a duration; pass x.view\('int64'\)"),
        (np.array(["a"]), "dtype <U1 is not supported; supported: float16, "),
        (np.ones(3, np.longdouble), "is not supported"),
        (np.ones(3, ml_dtypes.float8_e4m3), "with infinities.* pass float8_e4m3fn"),
        (np.ones(3, ml_dtypes.int4), "int4 is not supported"),
        (np.ma.ones(3), "masked array would be combined without its mask"),
        ([1.0, 2.0], r"a list is not an array; pass numpy.array\(x\)"),
        (3.5, r"a float is not an array; pass a numpy array .* numpy.array\(3.5, 'float32'\)"),
        (None, "a NoneType is not an array"),
        ("text", "a str is not an array"),
    ],
)
def test_dtypes_and_kinds_that_are_refused(x, says):
    with pytest.raises(ArrayTypeError, match=f"all_reduce: x: .*{says}"):
        array.view(x, **READ)


def test_read_only():
    x = np.ones(3)
    x.flags.writeable = False
    assert array.view(x, **READ).readonly
    with pytest.raises(ArrayError, match=r"read-only .*; pass x\.copy"):
        array.view(x, **WRITE)
    assert not array.is_immutable(x)


def test_scalars():
    x = np.float32(2.5)
    v = array.view(x, **READ)
    assert (v.count, v.shape, v.dtype) == (1, (), "float32")
    assert ctypes.c_float.from_address(v.pointer).value == 2.5
    assert array.is_immutable(x)
    with pytest.raises(ArrayError, match="numpy scalar is immutable"):
        array.view(x, **WRITE)
    out = array.new_like(x, ())
    out[...] = 4
    assert array.finish(x, out) == 4 and isinstance(array.finish(x, out), np.float32)


@pytest.mark.parametrize(
    ("x", "dtype", "count"),
    [
        (bytearray(b"abc"), "uint8", 3),
        (stdlib_array.array("d", [1, 2]), "float64", 2),
        (stdlib_array.array("l", [1, 2]), "int64", 2),
        (memoryview(bytearray(8)).cast("f"), "float32", 2),
        (memoryview(bytearray(8)).cast("B", (2, 4)), "uint8", 8),
        ((ctypes.c_int32 * 5)(), "int32", 5),
        (bytearray(), "uint8", 0),
    ],
)
def test_buffers(x, dtype, count):
    v = array.view(x, **WRITE)
    assert (v.dtype, v.count, v.kind) == (dtype, count, "buffer")
    if count:
        ctypes.memset(v.pointer, 1, 1)
        assert bytes(memoryview(x).cast("B"))[0] == 1
    assert array.new_like(x, (2,)).shape == (2,)


def test_a_bytearray_cannot_be_resized_under_a_view():
    x = bytearray(4)
    v = array.view(x, **WRITE)
    with pytest.raises(BufferError):
        x.extend(b"more")
    del v
    x.extend(b"more")


def test_bytes():
    x = b"abc"
    v = array.view(x, **READ)
    assert ctypes.string_at(v.pointer, 3) == x and v.readonly
    assert array.is_immutable(x)
    with pytest.raises(ArrayError, match="pass a bytearray"):
        array.view(x, **WRITE)
    out = array.new_like(x, (4,))
    out[:] = 65
    assert array.finish(x, out) == b"AAAA"


def test_buffers_that_are_refused():
    with pytest.raises(ArrayTypeError, match="not supported"):
        array.view(stdlib_array.array("u", "ab"), **READ)
    with pytest.raises(ArrayError, match=r"strides \(2,\)"):
        array.view(memoryview(b"abcd")[::2], **READ)


def test_overlap():
    x = np.arange(10.0)
    whole, begin, end = (array.view(a, **READ) for a in (x, x[:5], x[5:]))
    middle = array.view(x[3:7], **READ)
    assert array.overlap(whole, whole) == "same"
    assert array.overlap(begin, end) == "none"
    assert array.overlap(begin, middle) == array.overlap(middle, begin) == "partial"
    assert array.overlap(whole, begin) == "partial"
    assert array.overlap(whole, array.view(x[3:3], **READ)) == "none"
    array.check_overlap(begin, end, "all_gather")
    with pytest.raises(ArrayError, match="all_gather: input and output overlap in part"):
        array.check_overlap(whole, middle, "all_gather")


def test_dtype_names():
    for name in array.ITEM_SIZES:
        assert array.dtype_name(name) == name
        assert array.dtype_name(array.numpy_dtype(name)) == name
        assert array.numpy_dtype(name).itemsize == array.ITEM_SIZES[name]
    assert array.dtype_name(float) == "float64"
    assert array.dtype_name("f4") == array.dtype_name(np.float32) == "float32"
    for wrong, says in [
        ("flaot32", "did you mean 'float32'"),
        (None, "dtype is None"),
        (">f4", "byte order"),
    ]:
        with pytest.raises(ArrayTypeError, match=says):
            array.dtype_name(wrong)
    with pytest.raises(ArrayTypeError, match="did you mean 'int32'"):
        array.numpy_dtype("int23")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_from_pointer_keeps_its_owner(dtype):
    class Owner:
        memory = (ctypes.c_char * 64)()
        gone = False

        def __del__(self):
            Owner.gone = True

    address = ctypes.addressof(Owner.memory)
    x = array.from_pointer(address, (2, 3), dtype, owner=Owner())
    assert array.view(x, **WRITE).pointer == address and x.shape == (2, 3)
    x[...] = 1
    part = x[1:]
    del x
    gc.collect()
    assert not Owner.gone
    assert part[0, 0] == 1
    del part
    gc.collect()
    assert Owner.gone
    assert array.from_pointer(0, (0, 3), dtype, owner=None).shape == (0, 3)
    with pytest.raises(ArrayTypeError, match="did you mean 'numpy'"):
        array.from_pointer(address, (1,), dtype, owner=None, kind="nunpy")


class DeviceArray:
    """What a device array of another library looks like; its memory is never touched."""

    def __init__(self, strides=None, readonly=False):
        self.__cuda_array_interface__ = {
            "shape": (2, 3),
            "typestr": "<f4",
            "data": (4096, readonly),
            "strides": strides,
            "stream": 7,
            "version": 3,
        }


def test_device_arrays(monkeypatch):
    with pytest.raises(UnsupportedError, match=r"x: the array is on cuda, .* no GPU engine"):
        array.view(DeviceArray(), **READ)
    with pytest.raises(ArrayTypeError, match=r"x: no GPU has memory at 0x1000, where a DeviceArr"):
        array.view(DeviceArray(), gpu=True, **READ)
    monkeypatch.setattr(DeviceArray, "device", SimpleNamespace(id=0), raising=False)
    with pytest.raises(UnsupportedError, match=r"x: the array is on cuda:0, .* no GPU engine"):
        array.view(DeviceArray(), **READ)
    v = array.view(DeviceArray(strides=(12, 4)), gpu=True, **WRITE)
    assert (v.pointer, v.count, v.dtype, v.device, v.stream) == (4096, 6, "float32", "cuda:0", 7)
    with pytest.raises(ArrayError, match=r"strides \(4, 8\)"):
        array.view(DeviceArray(strides=(4, 8)), gpu=True, **READ)
    with pytest.raises(ArrayError, match="read-only"):
        array.view(DeviceArray(readonly=True), gpu=True, **WRITE)
    host = array.view(np.zeros(6, np.float32), **READ)
    assert array.overlap(host, v) == "none"


class Exporter:
    """Nothing but DLPack."""

    def __init__(self, inner, versioned=True):
        self.inner, self.versioned = inner, versioned

    def __dlpack_device__(self):
        return self.inner.__dlpack_device__()

    def __dlpack__(self, **options):
        if options and not self.versioned:
            raise TypeError("no max_version")
        return self.inner.__dlpack__(**options)


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack(versioned):
    inner = np.arange(6, dtype=np.int16).reshape(2, 3)
    v = array.view(Exporter(inner, versioned), **WRITE)
    assert (v.pointer, v.dtype, v.shape, v.kind) == (inner.ctypes.data, "int16", (2, 3), "dlpack")
    with pytest.raises(ArrayError, match=r"strides \(2, 6\) bytes"):
        array.view(Exporter(inner.T, versioned), **READ)


def test_dlpack_read_only_and_elsewhere():
    inner = np.arange(3.0)
    inner.flags.writeable = False
    assert array.view(Exporter(inner), **READ).readonly
    with pytest.raises(ArrayError, match="read-only"):
        array.view(Exporter(inner), **WRITE)

    class Elsewhere(Exporter):
        def __dlpack_device__(self):
            return (8, 0)

    with pytest.raises(UnsupportedError, match="DLPack device 8"):
        array.view(Elsewhere(inner), **READ)


@pytest.mark.torch
class TestTorch:
    @pytest.fixture(autouse=True)
    def torch(self):
        return pytest.importorskip("torch")

    @pytest.mark.parametrize("name", list(array.ITEM_SIZES))
    def test_dtypes(self, torch, name):
        foreign = {"float8_e4m3": "float8_e4m3fn"}.get(name, name)
        dtype = getattr(torch, foreign)
        x = torch.zeros((2, 3), dtype=torch.uint8).to(dtype)
        v = array.view(x, **WRITE)
        assert (v.pointer, v.count, v.dtype, v.shape) == (x.data_ptr(), 6, name, (2, 3))
        like = array.new_like(x, (4,))
        assert (like.dtype, tuple(like.shape)) == (dtype, (4,))
        assert array.finish(x, like) is like
        assert array.dtype_name(dtype) == name
        assert not array.is_immutable(x)

    def test_small_shapes(self, torch):
        assert array.view(torch.tensor(3.0), **WRITE).shape == ()
        assert array.view(torch.empty((0, 3)), **WRITE).count == 0

    def test_strides(self, torch):
        x = torch.zeros((4, 6))
        assert array.view(x[1:], **READ).pointer == x.data_ptr() + 24
        with pytest.raises(
            ArrayError, match=r"strides \(4, 24\) bytes .*Fortran.*x.contiguous\(\)"
        ):
            array.view(x.t(), **READ)

    def test_autograd(self, torch):
        leaf = torch.ones(3, requires_grad=True)
        assert array.view(leaf, **READ).pointer == leaf.data_ptr()
        assert array.view(torch.nn.Parameter(torch.ones(2)), **READ).count == 2
        with pytest.raises(ArrayError, match="a leaf that requires grad and would be written"):
            array.view(leaf, **WRITE)
        with pytest.raises(ArrayError, match="part of an autograd graph"):
            array.view(leaf * 2, **WRITE)
        with torch.no_grad():
            array.view(leaf, **WRITE)
        array.view(leaf.detach(), **WRITE)

    def test_autograd_notices_a_write(self, torch):
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        loss = (y * y).sum()
        array.view(y.detach(), **WRITE)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with torch.inference_mode():
            array.view(torch.ones(2), **WRITE)

    def test_refused(self, torch):
        with pytest.raises(ArrayError, match="lazy conjugate"):
            array.view(torch.ones(2, dtype=torch.complex64).conj(), **READ)
        with pytest.raises(ArrayTypeError, match=r"layout torch\.sparse_coo"):
            array.view(torch.eye(2).to_sparse(), **READ)
        with pytest.raises(ArrayTypeError, match="a tensor on meta has no memory"):
            array.view(torch.ones(2, device="meta"), **READ)
        with pytest.raises(ArrayTypeError, match=r"dtype torch\.float8_e4m3fnuz is not"):
            array.view(torch.empty(2, dtype=torch.float8_e4m3fnuz), **READ)

    def test_wrappers(self, torch):
        class Wrapper(torch.Tensor):
            def to_local(self):
                return self

        with pytest.raises(ArrayTypeError, match=r"a Wrapper wraps other .*x\.to_local"):
            array.view(torch.ones(2).as_subclass(Wrapper), **READ)

    def test_dlpack(self, torch):
        for dtype, name in (
            (torch.bfloat16, "bfloat16"),
            (torch.float32, "float32"),
            (torch.bool, "bool"),
        ):
            x = torch.zeros(4, dtype=dtype)
            v = array.view(Exporter(x), **READ)
            assert (v.pointer, v.dtype, v.count) == (x.data_ptr(), name, 4)

    def test_from_pointer(self, torch):
        memory = np.zeros(16, np.uint8)
        for dtype in ("float32", "bfloat16", "float8_e4m3"):
            x = array.from_pointer(memory.ctypes.data, (2, 2), dtype, owner=memory, kind="torch")
            assert (x.data_ptr(), tuple(x.shape)) == (memory.ctypes.data, (2, 2))
            assert array.view(x, **WRITE).dtype == dtype
        assert array.from_pointer(0, (0,), "bfloat16", owner=None, kind="torch").numel() == 0


@pytest.mark.jax
class TestJax:
    @pytest.fixture(autouse=True)
    def jax(self):
        return pytest.importorskip("jax")

    @pytest.mark.parametrize(
        "name", ["float32", "bfloat16", "float8_e4m3", "float8_e5m2", "int32", "bool", "complex64"]
    )
    def test_views_and_results(self, jax, name):
        x = jax.numpy.zeros((2, 3), array.numpy_dtype(name))
        v = array.view(x, **READ)
        assert (v.pointer, v.dtype, v.shape) == (x.unsafe_buffer_pointer(), name, (2, 3))
        assert v.readonly and array.is_immutable(x)
        buffer = array.new_like(x, (3, 5))
        address = buffer.ctypes.data
        buffer[...] = 1
        result = array.finish(x, buffer)
        assert isinstance(result, jax.Array) and result.dtype == x.dtype and result.shape == (3, 5)
        assert result.unsafe_buffer_pointer() == address  # taken over, not copied
        assert result.devices() == x.devices() and bool((result == 1).all())

    def test_small_shapes(self, jax):
        assert array.view(jax.numpy.float32(3), **READ).shape == ()
        empty = jax.numpy.zeros((0, 3))
        assert array.view(empty, **READ).count == 0
        assert array.finish(empty, array.new_like(empty, (0, 2))).shape == (0, 2)

    def test_refused(self, jax):
        x = jax.numpy.arange(4.0)
        with pytest.raises(ArrayError, match="jax arrays are immutable"):
            array.view(x, **WRITE)
        with pytest.raises(ArrayTypeError, match="inside jit, grad or vmap has no values"):
            jax.jit(lambda y: array.view(y, **READ).count)(x)
        x.delete()
        with pytest.raises(ArrayError, match="deleted or donated"):
            array.view(x, **READ)
        for access in (READ, WRITE):
            with pytest.raises(ArrayTypeError, match=r"x: dtype key<fry> .*jax\.random\.key_data"):
                array.view(jax.random.key(0), **access)


def test_nothing_else_is_imported():
    code = (
        "import sys, collectives.array, numpy as np; collectives.array.view(np.ones(2), "
        "writable=True)\nprint([m for m in ('torch', 'jax', 'mpi4py', 'cupy', 'ml_dtypes') if m in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_mask_is_seen_in_every_call():
    def body(comm):
        masked = np.ma.array([1.0, 2.0], mask=[True, False])
        for op in ("sum", "max"):
            for out in ({}, {"out": np.empty(2)}):
                with pytest.raises(cc.ArrayError, match="without its mask"):
                    comm.all_reduce(masked, op, **out)
        assert masked.data.tolist() == [1, 2]

    cc.run_threads(2, body, timeout=20)


@pytest.mark.parametrize(
    "x",
    [
        bytearray(4),
        memoryview(bytearray(4)),
        stdlib_array.array("i", [1, 2]),
        (ctypes.c_int * 2)(1, 2),
        Exporter(np.ones(4)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_new_results_that_are_of_numpy(x):
    """As docs/api.md lists them; what is written in place comes back as it is."""

    def body(comm):
        assert comm.all_reduce(x) is x
        assert comm.broadcast(x) is x
        made = [comm.all_gather(x), comm.reduce_scatter(x), comm.all_to_all(x)]
        return {type(result) for result in made}

    assert cc.run_threads(1, body, timeout=20) == [{np.ndarray}]
    assert cc.run_threads(1, lambda comm: type(comm.all_gather(b"ab"))) == [bytes]
