#include "memory.h"

#include "tensors.h"

namespace nb = nanobind;

namespace {

// The first fields of an array: NumPy's own macros, compiled into other extensions, read it so.
struct Fields {
    PyObject_HEAD
    char* data;
    int ndim;
    Py_ssize_t *shape, *strides;
    PyObject *base, *dtype;
    int flags;
};

constexpr int WRITEABLE = 0x0400;

const Fields& fields_of(PyObject* array) { return *reinterpret_cast<const Fields*>(array); }

struct Kind {
    PyObject* dtype;
    Py_ssize_t itemsize;
    Dtype number;
    bool floating;
};

PyObject* numpys_type;
Remembered<Kind, 32> kinds;  // of dtypes that are held

Kind kind_of(PyObject* dtype) {
    for (const Kind& each : kinds)
        if (each.dtype == dtype) return each;
    const nb::handle own(dtype);
    const auto itemsize = nb::cast<Py_ssize_t>(own.attr("itemsize"));
    const bool half = nb::str("e").equal(own.attr("char"));
    const Dtype number = itemsize == 2 ? half ? F16 : BF16 : itemsize == 4 ? F32 : F64;
    const nb::object name = nb::module_::import_("gradkit._dtypes").attr("float_name")(own);
    const Kind found = {dtype, itemsize, number, !name.is_none()};
    if (kinds.add(found)) own.inc_ref();
    return found;
}

}  // namespace

void define_memory() {
    numpys_type = nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr();
}

bool is_numpys(PyObject* object) { return nb::handle(object).type().ptr() == numpys_type; }

nb::handle dtype_of(PyObject* array) { return fields_of(array).dtype; }

bool is_floating(nb::handle dtype) { return kind_of(dtype.ptr()).floating; }

Dtype number_of(nb::handle dtype) { return kind_of(dtype.ptr()).number; }

int open_memory(PyObject* array, Py_buffer& buffer, Py_ssize_t (&strides)[MOST_AXES]) {
    if (!is_numpys(array)) {
        if (is_tensor(array)) {
            const Tensor tensor(array);
            tensor.describe(buffer, strides);
            return tensor.dtype();
        }
        if (PyObject_GetBuffer(array, &buffer, PyBUF_STRIDES)) throw nb::python_error();
        return -1;
    }
    const Fields& fields = fields_of(array);
    const Kind kind = kind_of(fields.dtype);
    buffer = {};  // without an owner
    buffer.buf = fields.data;
    buffer.itemsize = buffer.len = kind.itemsize;
    for (int axis = 0; axis < fields.ndim; ++axis) buffer.len *= fields.shape[axis];
    buffer.readonly = !(fields.flags & WRITEABLE);
    buffer.ndim = fields.ndim;
    buffer.shape = fields.shape;
    buffer.strides = fields.strides;
    return kind.number;
}
