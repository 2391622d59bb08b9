// gradkit._cpu.compiled: which arrays share memory, by their buffers' ranges of bytes alone.

#include <algorithm>

#include "module.h"

namespace nb = nanobind;

namespace {

// The bytes that an array covers: from `low` to before `high`.
struct Range {
    const char *low, *high;
    i64 array;
    bool written;
};

typedef std::vector<Range> Ranges;

bool is_numpys(PyObject* array) {
    static PyObject* const kind =
        nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr();
    return nb::handle(array).type().ptr() == kind;
}

// Whether two elements may share memory, as gradkit/_open/memory.py says it.
bool overlaps_itself(const Buffer& array) {
    Axis axes[MOST_AXES];
    int count = 0;
    for (int axis = 0; axis < array->ndim; ++axis) {
        const i64 length = array->shape[axis], stride = array->strides[axis];
        if (length == 0) return false;
        if (length > 1) axes[count++] = {length, stride < 0 ? -stride : stride};
    }
    std::sort(axes, axes + count, [](Axis a, Axis b) { return a.stride < b.stride; });
    i64 covered = array->itemsize;
    for (int axis = 0; axis < count; ++axis) {
        if (axes[axis].stride < covered) return true;
        covered += (axes[axis].length - 1) * axes[axis].stride;
    }
    return false;
}

Range range_of(const Buffer& array, i64 position, bool written) {
    const char* low = static_cast<const char*>(array->buf);
    const char* high = low + array->itemsize;
    for (int axis = 0; axis < array->ndim; ++axis) {
        const i64 steps = array->shape[axis] - 1, stride = array->strides[axis];
        if (steps < 0) return {low, low, position, written};
        (stride < 0 ? low : high) += steps * stride;
    }
    return {low, high, position, written};
}

// Those of arrays that have elements. False if `written` ones cannot clearly be written.
bool append(Ranges& ranges, const Sequence& arrays, bool written, bool checked) {
    for (i64 k = 0, length = arrays.length(); k < length; ++k) {
        PyObject* const array = arrays[k];
        if (array == Py_None) continue;
        if (checked && !is_numpys(array)) return false;
        const Buffer buffer(array);
        if (checked && written && (buffer->readonly || overlaps_itself(buffer))) return false;
        const Range range = range_of(buffer, k, written);
        if (range.low < range.high) ranges.push_back(range);
    }
    return true;
}

void sort(Ranges& ranges) {
    const auto before = [](const Range& a, const Range& b) { return a.low < b.low; };
    if (!std::is_sorted(ranges.begin(), ranges.end(), before))
        std::sort(ranges.begin(), ranges.end(), before);
}

// Whether arrays are NumPy's, and those of the first list can clearly be written: each element is
// apart from all others of both lists. None is skipped.
bool apart(nb::handle written, nb::handle read) {
    Ranges ranges;
    if (!append(ranges, Sequence(written), true, true)) return false;
    if (!append(ranges, Sequence(read), false, true)) return false;
    sort(ranges);
    const char *end = nullptr, *end_of_written = nullptr;
    for (const Range& each : ranges) {
        if (each.low < (each.written ? end : end_of_written)) return false;
        end = std::max(end, each.high);
        if (each.written) end_of_written = std::max(end_of_written, each.high);
    }
    return true;
}

// The positions of arrays in both lists whose ranges meet.
nb::list meetings(nb::handle written, nb::handle read) {
    Ranges ranges, open[2];  // those that may reach into the next one
    append(ranges, Sequence(written), true, false);
    append(ranges, Sequence(read), false, false);
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

}  // namespace

void define_overlap(nb::module_& module) {
    module.def("apart", &apart);
    module.def("meetings", &meetings);
}
