// gradkit._cpu.compiled: what a call has to know of its arrays before it computes, and which of them
// share memory, by ranges of bytes alone.

#include <algorithm>

#include "module.h"
#include "tensors.h"

namespace nb = nanobind;

namespace {

// The bytes that an array covers: from `low` to before `high`.
struct Range {
    const char *low, *high;
    i64 array;
    bool written;
};

typedef std::vector<Range> Ranges;

// Whether two elements may share memory; a yes may be wrong, and gradkit/_open/memory.py decides then.
bool overlaps_itself(const Py_buffer& array) {
    Axis axes[MOST_AXES];
    int count = 0;
    for (int axis = 0; axis < array.ndim; ++axis) {
        const i64 length = array.shape[axis], stride = array.strides[axis];
        if (length == 0) return false;
        if (length > 1) axes[count++] = {length, stride < 0 ? -stride : stride};
    }
    std::sort(axes, axes + count, [](Axis a, Axis b) { return a.stride < b.stride; });
    i64 covered = array.itemsize;
    for (int axis = 0; axis < count; ++axis) {
        if (axes[axis].stride < covered) return true;
        covered += (axes[axis].length - 1) * axes[axis].stride;
    }
    return false;
}

void append(Ranges& ranges, const Py_buffer& array, i64 position, bool written) {
    const char* low = static_cast<const char*>(array.buf);
    const char* high = low + array.itemsize;
    for (int axis = 0; axis < array.ndim; ++axis) {
        const i64 steps = array.shape[axis] - 1, stride = array.strides[axis];
        if (steps < 0) return;  // no elements
        (stride < 0 ? low : high) += steps * stride;
    }
    ranges.push_back({low, high, position, written});
}

void sort(Ranges& ranges) {
    const auto before = [](const Range& a, const Range& b) { return a.low < b.low; };
    if (!std::is_sorted(ranges.begin(), ranges.end(), before))
        std::sort(ranges.begin(), ranges.end(), before);
}

// Whether no range that is written meets another; they get another order.
bool lie_apart(Ranges& ranges) {
    sort(ranges);
    const char *end = nullptr, *end_of_written = nullptr;
    for (const Range& each : ranges) {
        if (each.low < (each.written ? end : end_of_written)) return false;
        end = std::max(end, each.high);
        if (each.written) end_of_written = std::max(end_of_written, each.high);
    }
    return true;
}

// Those of arrays that have elements. False if an array is not NumPy's, or cannot clearly be written;
// None is skipped.
bool append_plain(Ranges& ranges, const Sequence& arrays, bool written) {
    for (i64 k = 0, length = arrays.length(); k < length; ++k) {
        PyObject* const array = arrays[k];
        if (array == Py_None) continue;
        if (!is_numpys(array)) return false;
        const Buffer buffer(array);
        if (written && (buffer->readonly || overlaps_itself(*buffer))) return false;
        append(ranges, *buffer, k, written);
    }
    return true;
}

// Whether arrays are NumPy's, and those of the first list can clearly be written: each element is
// apart from all others of both lists.
bool apart(nb::handle written, nb::handle read) {
    Ranges ranges;
    return append_plain(ranges, Sequence(written), true)
        && append_plain(ranges, Sequence(read), false) && lie_apart(ranges);
}

bool has_shape_of(const Py_buffer& array, const Py_buffer& other) {
    return array.ndim == other.ndim && std::equal(array.shape, array.shape + array.ndim, other.shape);
}

// The different pairs of dtypes of two lists of NumPy's arrays, if each has its partner's shape and can be
// written apart from all others, except perhaps the very partner; None if that is not so, or not clear.
nb::object fitting(nb::handle written, nb::handle others, bool may_be) {
    const Sequence into(written), from(others);
    Ranges ranges;
    nb::list found;
    nb::handle last[2];
    if (into.length() != from.length()) return nb::none();
    for (i64 k = 0, length = into.length(); k < length; ++k) {
        PyObject *const array = into[k], *const other = from[k];
        if (!is_numpys(array) || !is_numpys(other)) return nb::none();
        const Buffer own(array), partner(other);
        if (own->readonly || overlaps_itself(*own) || !has_shape_of(*own, *partner)) return nb::none();
        append(ranges, *own, k, true);
        if (array != other || !may_be) append(ranges, *partner, k, false);
        const nb::handle dtypes[] = {dtype_of(array), dtype_of(other)};
        if (!dtypes[0].is(last[0]) || !dtypes[1].is(last[1]))
            found.append(nb::make_tuple(dtypes[0], dtypes[1]));
        std::copy(dtypes, dtypes + 2, last);
    }
    if (!lie_apart(ranges)) return nb::none();
    return found;
}

// The positions of arrays in both lists whose ranges meet.
nb::list meetings(nb::handle written, nb::handle read) {
    Ranges ranges, open[2];  // those that may reach into the next one
    const Sequence lists[] = {Sequence(read), Sequence(written)};
    for (const bool side : {true, false})
        for (i64 k = 0, length = lists[side].length(); k < length; ++k)
            append(ranges, *Buffer(lists[side][k]), k, side);
    sort(ranges);
    nb::list found;
    for (const Range& each : ranges) {
        Ranges& others = open[!each.written];
        const auto ends = [&](const Range& other) { return other.high <= each.low; };
        others.erase(std::remove_if(others.begin(), others.end(), ends), others.end());
        for (const Range& other : others) {
            const Range &first = each.written ? each : other, &second = each.written ? other : each;
            found.append(nb::make_tuple(first.array, second.array));
        }
        open[each.written].push_back(each);
    }
    return found;
}

// Whether there are arrays, all NumPy's and of some dtypes; and if `written`, as in `apart`.
bool plain(nb::handle arrays, nb::handle dtypes, bool written) {
    const Sequence items(arrays);
    nb::handle known;  // the last one's
    for (i64 k = 0, length = items.length(); k < length; ++k) {
        if (!is_numpys(items[k])) return false;
        const nb::handle dtype = dtype_of(items[k]);
        if (!dtype.is(known) && PySet_Contains(dtypes.ptr(), dtype.ptr()) != 1) return false;
        known = dtype;
    }
    Ranges ranges;
    return known.is_valid() && (!written || (append_plain(ranges, items, true) && lie_apart(ranges)));
}

bool is_plain(nb::handle value) {
    const PyTypeObject* const kind = Py_TYPE(value.ptr());
    return value.is_none() || kind == &PyBool_Type || kind == &PyFloat_Type || kind == &PyLong_Type;
}

// What a call has of something: the first ones need no memory of their own.
template <typename T> class Few {
public:
    void push_back(T item) {
        if (count_ < MOST) first_[count_] = std::move(item);
        else others_.push_back(std::move(item));
        ++count_;
    }
    i64 size() const { return count_; }
    const T& operator[](i64 k) const { return k < MOST ? first_[k] : others_[k - MOST]; }

private:
    static constexpr i64 MOST = 8;
    T first_[MOST];
    std::vector<T> others_;
    i64 count_ = 0;
};

typedef Few<nb::object> Objects;

void append(Objects& objects, nb::tuple items) {
    for (nb::handle item : items) objects.push_back(nb::borrow(item));
}

bool are_plain(const Objects& values) {
    for (i64 k = 0; k < values.size(); ++k)
        if (!is_plain(values[k])) return false;
    return true;
}

// A number for an item that is also one of the first, which are `written`: less than any number of
// axes, and -1 for None. 0 if it is none of them.
template <typename Items> i64 also_written(const Items& items, i64 written, i64 item) {
    for (i64 k = 0; item >= written && k < written; ++k)
        if (nb::handle(items[k]).is(items[item])) return -2 - k;
    return 0;
}

// All that a plan depends on: what computes, a call's options and their types, and the arrays, which may
// be None, by dtypes, shapes, strides and which are one. None if an array is not NumPy's, or if one of the
// first, which are `written`, cannot clearly be.
nb::object key_of(nb::handle backend, const Objects& options, const Objects& arrays, i64 written) {
    const i64 count = arrays.size();
    std::vector<i64> numbers;
    Few<PyObject*> key;  // borrowed
    numbers.reserve(8 * count);
    key.push_back(backend.ptr());
    for (i64 k = 0; k < options.size(); ++k) key.push_back(options[k].ptr());
    for (i64 k = 0; k < options.size(); ++k) key.push_back(options[k].type().ptr());
    Ranges ranges;
    for (i64 k = 0; k < count; ++k) {
        PyObject* const array = arrays[k].ptr();
        if (array == Py_None) {
            numbers.push_back(-1);
            continue;
        }
        if (const i64 same = also_written(arrays, written, k)) {
            numbers.push_back(same);
            continue;
        }
        if (!is_numpys(array)) return nb::none();
        const Buffer buffer(array);
        if (k < written && (buffer->readonly || overlaps_itself(*buffer))) return nb::none();
        if (written) append(ranges, *buffer, k, k < written);
        numbers.push_back(buffer->ndim);
        numbers.insert(numbers.end(), buffer->shape, buffer->shape + buffer->ndim);
        numbers.insert(numbers.end(), buffer->strides, buffer->strides + buffer->ndim);
        key.push_back(dtype_of(array).ptr());
    }
    if (!lie_apart(ranges)) return nb::none();
    const nb::bytes seen(numbers.data(), numbers.size() * sizeof(i64));
    key.push_back(seen.ptr());
    const nb::object made = nb::steal(PyTuple_New(key.size()));
    for (i64 k = 0; k < key.size(); ++k) {
        Py_INCREF(key[k]);
        if (PyTuple_SetItem(made.ptr(), k, key[k])) throw nb::python_error();
    }
    return made;
}

nb::object signature(nb::handle backend, nb::tuple options, nb::tuple arrays, i64 written) {
    Objects own, seen;
    append(own, options);
    append(seen, arrays);
    return key_of(backend, own, seen, written);
}

// Appends a call's fields of some names.
void read_fields(nb::handle call, nb::handle names, Objects& into) {
    static PyObject* const own = PyUnicode_InternFromString("__class__");  // told sooner by itself
    for (nb::handle name : nb::borrow<nb::tuple>(names)) {
        if (name.ptr() == own) {
            into.push_back(nb::borrow(call.type()));
            continue;
        }
        PyObject* const value = PyObject_GetAttr(call.ptr(), name.ptr());
        if (!value) throw nb::python_error();
        into.push_back(nb::steal(value));
    }
}

// Whether values are the very ones that are known, in a tuple of as many; None if none are.
bool are_those(const Objects& values, nb::handle known) {
    if (known.is_none()) return false;
    for (i64 k = 0; k < values.size(); ++k)
        if (!values[k].is(known[k])) return false;
    return true;
}

// The plan of a call, by a key as above, if the numbers that no plan depends on are the very ones that
// passed their checks in the last call. Else the plan, or None; the key, or None, also if those are more
// than numbers; and the numbers, to be checked.
nb::object known(nb::dict plans, nb::handle backend, nb::handle call, nb::tuple names, nb::tuple outs) {
    Objects options, passed, arrays;
    append(arrays, outs);
    read_fields(call, names[0], options);
    read_fields(call, names[1], passed);
    read_fields(call, names[2], arrays);
    const i64 written = static_cast<i64>(outs.size()) + nb::cast<i64>(names[3]);
    nb::object plan = nb::none(), key = nb::none();
    if (are_plain(passed)) key = key_of(backend, options, arrays, written);
    if (!key.is_none()) {
        PyObject* const found = PyDict_GetItemWithError(plans.ptr(), key.ptr());
        if (found) {
            plan = nb::borrow(found);
            if (!passed.size() || are_those(passed, plan.attr("passed"))) return plan;
        } else if (PyErr_Occurred()) {  // an option that has no hash
            if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
            PyErr_Clear();
            key = nb::none();
        }
    }
    nb::list all;
    for (i64 k = 0; k < passed.size(); ++k) all.append(passed[k]);
    return nb::make_tuple(plan, key, nb::tuple(all));
}

// Tensors of one call.
class Tensors {
public:
    // The first `written` are written, or absent. Others may require grad if `detach`.
    Tensors(i64 written, bool detach, int device_type)
        : written_(written), detach_(detach), device_type_(device_type) {}

    // False if kernels on a device of that type, the first tensor's, cannot use it as it is, or if it
    // clearly cannot be written.
    bool append(PyObject* object) {
        const bool writes = count_++ < written_;
        if (!is_tensor(object) || ((writes || !detach_) && requires_grad(object))) return false;
        const Tensor tensor(object);
        if (device_ < 0) device_ = tensor->device.number;
        if (tensor->device.type != device_type_ || tensor->device.number != device_) return false;
        dtype_ = tensor.dtype();
        // A tensor without elements has no address.
        if (dtype_ < 0 || !tensor->data || tensor->ndim > MOST_AXES || is_negative(object))
            return false;
        tensor.describe(buffer_, strides_);
        if (writes && overlaps_itself(buffer_)) return false;
        if (written_) ::append(ranges_, buffer_, count_ - 1, writes);
        return true;
    }

    void skip() { ++count_; }  // one that is absent

    bool lie_apart() { return ::lie_apart(ranges_); }

    // Of the last one.
    const Py_buffer& buffer() const { return buffer_; }
    i64 address() const { return reinterpret_cast<i64>(buffer_.buf); }
    int dtype() const { return dtype_; }

    int device() const { return device_; }

private:
    i64 written_, count_ = 0;
    bool detach_;
    int device_type_, device_ = -1, dtype_ = -1;
    Ranges ranges_;
    Py_buffer buffer_;
    Py_ssize_t strides_[MOST_AXES];
};

// Whether there are tensors in host memory, all of floating-point numbers; and if `written`, as in
// `apart`.
bool plain_tensors(nb::handle list, bool written, int device_type) {
    const Sequence items(list);
    const i64 length = items.length();
    Tensors tensors(written ? length : 0, false, device_type);
    try {
        for (i64 k = 0; k < length; ++k)
            if (!tensors.append(items[k])) return false;
    } catch (nb::python_error&) {  // which another look at them raises too, with a name
        return false;
    }
    return length && tensors.lie_apart();
}

// Addresses of tensors on one device of that type, and all else that a launch depends on; None if they
// are no such tensors of floating-point numbers. Of contiguous ones it is their number of elements.
nb::object borrowed_tensors(nb::handle list, int device_type) {
    const Sequence items(list);
    const i64 length = items.length();
    Tensors tensors(0, false, device_type);
    std::vector<i64> flat = {1, length}, strided = {0, length};  // so that lists can be joined
    nb::object addresses = nb::steal(PyTuple_New(length));
    bool contiguous = true;
    try {
        for (i64 k = 0; k < length; ++k) {
            if (!tensors.append(items[k])) return nb::none();
            const Py_buffer& buffer = tensors.buffer();
            i64 size = 1;
            for (int axis = buffer.ndim - 1; axis >= 0; --axis) {
                const i64 expected = size * buffer.itemsize;
                contiguous &= buffer.shape[axis] == 1 || buffer.strides[axis] == expected;
                size *= buffer.shape[axis];
            }
            flat.insert(flat.end(), {tensors.dtype(), size});
            strided.insert(strided.end(), {tensors.dtype(), buffer.ndim});
            strided.insert(strided.end(), buffer.shape, buffer.shape + buffer.ndim);
            strided.insert(strided.end(), buffer.strides, buffer.strides + buffer.ndim);
            if (PyTuple_SetItem(addresses.ptr(), k, nb::int_(tensors.address()).release().ptr()))
                throw nb::python_error();
        }
    } catch (nb::python_error&) {
        return nb::none();
    }
    const std::vector<i64>& layout = contiguous ? flat : strided;
    const nb::bytes seen(layout.data(), layout.size() * sizeof(i64));
    return nb::make_tuple(addresses, nb::make_tuple(seen));
}

// What a plan depends on of tensors, which may be None, on one device of that type; with an alignment
// also their addresses, 0 for None, which are multiples of it, and the device's number. None if a
// kernel cannot use them as they are, or if one of the first, which are `written`, cannot clearly be.
nb::object described_tensors(
    nb::handle arrays, i64 written, bool detach, int device_type, i64 alignment
) {
    const Sequence items(arrays);
    Tensors tensors(written, detach, device_type);
    std::vector<i64> numbers;
    numbers.reserve(64);
    nb::list addresses;
    try {
        for (i64 k = 0, length = items.length(); k < length; ++k) {
            if (items[k] == Py_None) {
                tensors.skip();
                numbers.push_back(-1);
                if (alignment) addresses.append(nb::int_(0));
                continue;
            }
            const i64 same = also_written(items, written, k);
            if (same) {
                numbers.push_back(same);
                if (alignment) addresses.append(addresses[-2 - same]);
                continue;
            }
            if (!tensors.append(items[k])) return nb::none();
            const Py_buffer& buffer = tensors.buffer();
            numbers.push_back(tensors.dtype());
            numbers.push_back(buffer.ndim);
            numbers.insert(numbers.end(), buffer.shape, buffer.shape + buffer.ndim);
            numbers.insert(numbers.end(), buffer.strides, buffer.strides + buffer.ndim);
            if (alignment) {
                if (tensors.address() % alignment) return nb::none();
                addresses.append(tensors.address());
            }
        }
    } catch (nb::python_error&) {
        return nb::none();
    }
    if (!tensors.lie_apart()) return nb::none();
    const nb::bytes seen(numbers.data(), numbers.size() * sizeof(i64));
    if (!alignment) return seen;
    return nb::make_tuple(seen, addresses, tensors.device());
}

}  // namespace

void define_overlap(nb::module_& module) {
    module.def("apart", &apart);
    module.def("fitting", &fitting);
    module.def("meetings", &meetings);
    module.def("plain", &plain);
    module.def("signature", &signature);
    module.def("known", &known);
    module.def("plain_tensors", &plain_tensors);
    module.def("borrowed_tensors", &borrowed_tensors);
    module.def("described_tensors", &described_tensors);
}
