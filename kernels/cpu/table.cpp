// gradkit._cpu.compiled: the arrays of a list, read in one pass over the caller's containers.

#include "table.h"

#include <algorithm>

#include "tensors.h"

namespace nb = nanobind;

namespace {

constexpr Py_ssize_t ITEMSIZES[] = {2, 2, 4, 8};  // of dtypes
constexpr int DEEPEST = 100;  // containers in each other, as gradkit/_open/trees.py has it

bool is_a(PyObject* object, PyTypeObject* kind) { return Py_TYPE(object) == kind; }

// The number of items of a list or a tuple; -1 if it is neither.
Py_ssize_t length_of(PyObject* object) {
    if (is_a(object, &PyList_Type)) return PyList_Size(object);
    return is_a(object, &PyTuple_Type) ? PyTuple_Size(object) : -1;
}

PyObject* item_of(PyObject* object, Py_ssize_t k) {
    return is_a(object, &PyList_Type) ? PyList_GetItem(object, k) : PyTuple_GetItem(object, k);
}

// True if keys are equal, told without running any code of theirs.
bool same_key(PyObject* a, PyObject* b) {
    if (a == b) return true;
    return is_a(a, &PyUnicode_Type) && is_a(b, &PyUnicode_Type) && PyUnicode_Compare(a, b) == 0;
}

Remembered<PyTypeObject*, 64> of_devices;  // which are never freed

// From now on arrays of this type are read as CuPy's are.
void use_device_arrays(nb::handle kind) {
    of_devices.add(reinterpret_cast<PyTypeObject*>(kind.inc_ref().ptr()));
}

bool is_of_device(PyObject* object) {
    return std::find(of_devices.begin(), of_devices.end(), Py_TYPE(object)) != of_devices.end();
}

// Lists on devices whose launches may be known, the one used last in front.
struct Known {
    std::vector<i64> numbers;
    nb::object object;
};

constexpr size_t MOST_KNOWN = 64;

nb::ft_mutex mutex_of_known;

// The numbers of an array's attribute.
void append_numbers(std::vector<i64>& extents, PyObject* array, PyObject* name) {
    for (nb::handle each : nb::borrow<nb::tuple>(nb::getattr(array, name))) extents.push_back(nb::cast<i64>(each));
}

// The strides of the shape that comes last, without gaps in C order.
void append_strides(std::vector<i64>& extents, i64 ndim, Py_ssize_t itemsize) {
    const size_t end = extents.size();
    extents.resize(end + ndim, itemsize);
    for (i64 axis = 1; axis < ndim; ++axis)
        extents[end + ndim - 1 - axis] = extents[end + ndim - axis] * std::max<i64>(extents[end - axis], 1);
}

}  // namespace

nb::object unchanging(PyObject* container) {
#ifdef NB_FREE_THREADED
    PyObject* const copy = PyList_Check(container) ? PyList_GetSlice(container, 0, PY_SSIZE_T_MAX)
        : PyDict_Check(container) ? PyDict_Copy(container) : Py_NewRef(container);
    if (!copy) throw nb::python_error();
    return nb::steal(copy);
#else
    return nb::borrow(container);
#endif
}

// Nothing here runs Python code, so that no container changes on the way.
bool Table::collect(PyObject* tree, int depth) {
    const Py_ssize_t length = length_of(tree);
    const bool leaf = length < 0 && !is_a(tree, &PyDict_Type) && tree != Py_None;
    flat_ = depth == 0 ? is_a(tree, &PyList_Type) : flat_ && leaf;
    if (tree == Py_None) return true;
    if (leaf) return PyList_Append(arrays_.ptr(), tree) == 0;
    if (depth == DEEPEST) return false;
    const nb::object own = unchanging(tree);
    const Py_ssize_t count = length_of(own.ptr());
    for (Py_ssize_t k = 0; k < count; ++k)
        if (!collect(item_of(own.ptr(), k), depth + 1)) return false;
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (count < 0 && PyDict_Next(own.ptr(), &at, &key, &value))
        if (!collect(value, depth + 1)) return false;
    return true;
}

bool Table::read_array(PyObject* array) {
    if (!is_numpys(array) || !is_floating(dtype_of(array))) return false;
    Py_buffer buffer;
    Py_ssize_t strides[MOST_AXES];
    const int dtype = open_memory(array, buffer, strides);
    const i64 at = static_cast<i64>(extents_.size());
    extents_.insert(extents_.end(), buffer.shape, buffer.shape + buffer.ndim);
    extents_.insert(extents_.end(), buffer.strides, buffer.strides + buffer.ndim);
    rows_.push_back({static_cast<char*>(buffer.buf), at, buffer.ndim, static_cast<Dtype>(dtype),
                     buffer.readonly != 0});
    return true;
}

bool Table::read_tensor(PyObject* object, bool detach) {
    if (!is_tensor(object) || (!detach && requires_grad(object))) return false;
    const Tensor tensor(object);
    const int dtype = tensor.dtype();
    if (rows_.empty()) device_ = tensor.place();
    if (device_ == ELSEWHERE || tensor.place() != device_) return false;
    // A tensor without elements has no address.
    if (dtype < 0 || !tensor->data || tensor->ndim > MOST_AXES || is_negative(object)) return false;
    Py_buffer buffer;
    Py_ssize_t strides[MOST_AXES];
    tensor.describe(buffer, strides);
    const i64 at = static_cast<i64>(extents_.size());
    extents_.insert(extents_.end(), buffer.shape, buffer.shape + buffer.ndim);
    extents_.insert(extents_.end(), strides, strides + buffer.ndim);
    rows_.push_back(
        {static_cast<char*>(buffer.buf), at, buffer.ndim, static_cast<Dtype>(dtype), false}
    );
    return true;
}

// As CuPy describes its arrays; no other code of Python runs. Strides take longest to ask for.
bool Table::read_device_array(PyObject* array, bool as_flat) {
    if (!is_of_device(array)) return false;
    const nb::object memory = nb::getattr(array, attributes.data);
    const nb::object kind = nb::getattr(array, attributes.dtype);
    const int place = static_cast<int>(nb::cast<i64>(nb::getattr(memory, attributes.device_id)));
    if (rows_.empty()) device_ = place;
    if (place != device_ || !is_floating(kind)) return false;
    const i64 at = static_cast<i64>(extents_.size());
    const Dtype dtype = number_of(kind);
    const bool contiguous = nb::getattr(array, attributes.c_contiguous, Py_False).ptr() == Py_True;
    as_flat = as_flat && contiguous;
    if (as_flat)
        extents_.push_back(nb::cast<i64>(nb::getattr(array, attributes.size)));
    else
        append_numbers(extents_, array, attributes.shape);
    const i64 ndim = static_cast<i64>(extents_.size()) - at;
    if (contiguous)
        append_strides(extents_, ndim, ITEMSIZES[dtype]);
    else
        append_numbers(extents_, array, attributes.strides);
    const nb::object pointer = nb::getattr(memory, attributes.ptr);
    char* const address = reinterpret_cast<char*>(nb::cast<uintptr_t>(pointer));
    rows_.push_back({address, at, static_cast<int>(ndim), dtype, false, as_flat});
    return ndim <= MOST_AXES;
}

bool Table::add(PyObject* array, bool detach, bool as_flat) {
    try {
        if (rows_.empty()) {
            library_ = is_tensor(array) ? TENSORS : is_of_device(array) ? DEVICE_ARRAYS : NUMPY;
            if (library_ == TENSORS && is_observed(array)) return false;
        }
        if (library_ == NUMPY) return read_array(array);
        return library_ == TENSORS ? read_tensor(array, detach) : read_device_array(array, as_flat);
    } catch (nb::python_error&) {  // which another look raises too, with the array's name
        return false;
    }
}

bool Table::is_beside(PyObject* array, Range& range) const {
    try {
        if (are_tensors()) {
            if (!is_tensor(array) || requires_grad(array) || is_negative(array)) return false;
            const Tensor tensor(array);
            const char* const data = static_cast<const char*>(tensor->data) + tensor->byte_offset;
            range = {data, data + tensor->dtype.bits / 8, 0, true};
            return tensor.place() == device_ && tensor->data && !tensor->ndim;
        }
        if (library_ != DEVICE_ARRAYS || !is_of_device(array)) return false;
        const nb::object memory = nb::getattr(array, "data");
        const char* const data = reinterpret_cast<const char*>(nb::cast<uintptr_t>(nb::getattr(memory, "ptr")));
        range = {data, data + nb::cast<i64>(nb::getattr(array, "nbytes")), 0, true};
        return nb::cast<int>(nb::getattr(memory, "device_id")) == device_ && !nb::len(nb::getattr(array, "shape"));
    } catch (nb::python_error&) {  // as in `add`
        return false;
    }
}

bool Table::read() {
    const Py_ssize_t length = PyList_Size(arrays_.ptr());
    rows_.reserve(length);
    extents_.reserve(4 * length);
    for (Py_ssize_t k = 0; k < length; ++k)
        if (!add(array(k), false, true)) return false;
    return true;
}

bool Table::each_can_be_written() const {
    for (i64 k = 0; k < length(); ++k)
        if (rows_[k].readonly || overlaps_itself(buffer(k))) return false;
    return true;
}

nb::object Table::of(nb::handle tree, bool written) {
    nb::object made = nb::cast(Table());
    Table& table = *nb::inst_ptr<Table>(made);
    table.tree_ = nb::borrow(tree);
    if (!table.collect(tree.ptr(), 0) || !table.read()) return nb::none();
    if (!written) return made;
    Ranges ranges;
    table.append_to(ranges, true);
    return table.each_can_be_written() && lie_apart(ranges) ? made : nb::none();
}

nb::object Table::leaves(nb::handle tree) {
    Table table;
    if (!table.collect(tree.ptr(), 0)) return nb::none();
    return nb::make_tuple(table.arrays_, table.flat_);
}

const Table* Table::in(nb::handle object) {
    return nb::isinstance<Table>(object) ? nb::inst_ptr<Table>(object) : nullptr;
}

Py_buffer Table::buffer(i64 k) const {
    const Row& row = rows_[k];
    Py_buffer buffer = {};
    buffer.buf = row.data;
    buffer.itemsize = buffer.len = ITEMSIZES[row.dtype];
    buffer.readonly = row.readonly;
    buffer.ndim = row.ndim;
    buffer.shape = const_cast<Py_ssize_t*>(extents_.data() + row.extents);
    buffer.strides = buffer.shape + row.ndim;
    for (int axis = 0; axis < row.ndim; ++axis) buffer.len *= buffer.shape[axis];
    return buffer;
}

namespace {

// Walks two containers side by side; `k` counts the leaves, which must be those of the tables.
bool same_places(const Table& a, const Table& b, PyObject* x, PyObject* y, i64& k) {
    if (x == Py_None || y == Py_None) return x == y;
    const bool dicts[] = {is_a(x, &PyDict_Type), is_a(y, &PyDict_Type)};
    if (!dicts[0] && length_of(x) < 0) {
        const bool known = k < a.length() && k < b.length() && x == a.array(k) && y == b.array(k);
        return known && ++k;
    }
    const nb::object own = unchanging(x), other = unchanging(y);
    x = own.ptr(), y = other.ptr();
    const Py_ssize_t length = length_of(x);
    if (dicts[0] != dicts[1] || length != length_of(y)) return false;
    for (Py_ssize_t item = 0; item < length; ++item)
        if (!same_places(a, b, item_of(x, item), item_of(y, item), k)) return false;
    if (length >= 0) return true;
    PyObject *keys[2], *values[2];
    Py_ssize_t at[2] = {};
    if (PyDict_Size(x) != PyDict_Size(y)) return false;
    while (PyDict_Next(x, &at[0], &keys[0], &values[0])) {
        if (!PyDict_Next(y, &at[1], &keys[1], &values[1]) || !same_key(keys[0], keys[1])) return false;
        if (!same_places(a, b, values[0], values[1], k)) return false;
    }
    return true;
}

}  // namespace

bool Table::has_places_of(const Table& other) const {
    i64 k = 0;
    return length() == other.length() && same_places(*this, other, tree_.ptr(), other.tree_.ptr(), k)
        && k == length();
}

// True if an array has the shape of that of another table.
bool Table::is_like(const Table& other, i64 k) const {
    const Row &own = rows_[k], &its = other.rows_[k];
    if (own.as_flat || its.as_flat)
        return nb::getattr(array(k), attributes.shape).equal(nb::getattr(other.array(k), attributes.shape));
    const i64* const shape = extents_.data() + own.extents;
    return own.ndim == its.ndim && std::equal(shape, shape + own.ndim, other.extents_.data() + its.extents);
}

int Table::pairs_with(const Table& other) const {
    int pairs = 0;
    for (i64 k = 0; k < length(); ++k) {
        if (!is_like(other, k)) return -1;
        pairs |= 1 << (4 * rows_[k].dtype + other.rows_[k].dtype);
    }
    return pairs;
}

void Table::append_to(Ranges& ranges, bool written, const Table* but_for) const {
    ranges.reserve(ranges.size() + rows_.size());
    for (i64 k = 0; k < length(); ++k)
        if (!but_for || but_for->array(k) != array(k)) append(ranges, buffer(k), k, written);
}

nb::object Table::views() {
    if (!views_.is_valid()) views_ = are_tensors() ? views_of_tensors(arrays_) : nb::object(arrays_);
    return views_;
}

nb::object Table::view(nb::handle k) {
    if (!are_tensors() || views_.is_valid() || !PyLong_Check(k.ptr())) return views()[k];
    nb::list one;
    one.append(nb::object(nb::handle(arrays_)[k]));
    return views_of_tensors(one)[0];
}

nb::object Table::addresses() {
    if (addresses_.is_valid()) return addresses_;
    addresses_ = nb::steal(PyTuple_New(length()));
    for (i64 k = 0; k < length(); ++k) {
        PyObject* const address = PyLong_FromVoidPtr(rows_[k].data);
        if (!address || PyTuple_SetItem(addresses_.ptr(), k, address)) throw nb::python_error();
    }
    return addresses_;
}

// True if there are no gaps, in C order.
static bool is_contiguous(const Py_buffer& array) {
    i64 size = array.itemsize;
    for (int axis = array.ndim - 1; axis >= 0; --axis) {
        if (array.shape[axis] != 1 && array.strides[axis] != size) return false;
        size *= array.shape[axis];
    }
    return true;
}

std::vector<i64> Table::numbers() const {
    std::vector<i64> flat = {1, length()}, strided = {0, length()};
    bool contiguous = true;
    for (i64 k = 0; k < length(); ++k) {
        const Py_buffer own = buffer(k);
        contiguous = contiguous && is_contiguous(own);
        flat.insert(flat.end(), {dtype(k), own.len / own.itemsize});
        strided.insert(strided.end(), {dtype(k), own.ndim});
        strided.insert(strided.end(), own.shape, own.shape + 2 * own.ndim);
    }
    return contiguous ? flat : strided;
}

nb::bytes Table::layout() const {
    const std::vector<i64> found = numbers();
    return nb::bytes(found.data(), found.size() * sizeof(i64));
}

nb::object Table::known() {
    static auto* const all = new std::vector<Known>;  // no destructor: the interpreter is gone then
    const nb::ft_lock_guard lock(mutex_of_known);
    if (known_.is_valid()) return known_;
    std::vector<i64> own = {place()};
    for (const Row& row : rows_) own.push_back(reinterpret_cast<i64>(row.data));  // which differ soonest
    const std::vector<i64> layout = numbers();
    own.insert(own.end(), layout.begin(), layout.end());
    const auto is_own = [&](const Known& each) { return each.numbers == own; };
    auto found = std::find_if(all->begin(), all->end(), is_own);
    if (found == all->end()) {
        if (all->size() == MOST_KNOWN) all->pop_back();
        all->push_back({std::move(own), nb::handle(reinterpret_cast<PyObject*>(&PyBaseObject_Type))()});
        found = all->end() - 1;
    }
    std::rotate(all->begin(), found, found + 1);
    return known_ = all->front().object;
}

nb::object Table::like(nb::list arrays) const { return of(arrays, false); }

nb::object Table::picked(nb::handle chosen) const {
    nb::list some;
    Py_ssize_t k = 0;
    for (nb::handle one : chosen) {
        const int is_chosen = PyObject_IsTrue(one.ptr());
        if (is_chosen < 0) throw nb::python_error();
        if (is_chosen) some.append(nb::borrow(array(k)));
        ++k;
    }
    return like(some);
}

void define_table(nb::module_& module) {
    nb::class_<Table>(module, "Table")
        .def("__len__", &Table::length)
        .def("__iter__", [](Table& table) { return nb::iter(table.views()); })
        .def("__getitem__", &Table::view)
        .def_prop_ro("arrays", &Table::arrays)
        .def_prop_ro("tree", &Table::tree)
        .def_prop_ro("is_flat", &Table::is_flat)
        .def_prop_ro("are_tensors", &Table::are_tensors)
        .def_prop_ro("device", &Table::device)
        .def_prop_ro("addresses", &Table::addresses)
        .def_prop_ro("layout", &Table::layout)
        .def_prop_ro("known", &Table::known)
        .def_rw("plan", &Table::plan, nb::arg().none())
        .def("pairs_with", &Table::pairs_with)
        .def("picked", &Table::picked)
        .def("like", &Table::like);
    const auto table = [](nb::handle tree, bool written) {
        const nb::object made = Table::of(tree, written);
        return made.is_none() || nb::inst_ptr<Table>(made)->length() ? made : nb::none();
    };
    module.def("table", table, nb::arg().none(), nb::arg());
    module.def("leaves", &Table::leaves, nb::arg().none());
    module.def("use_device_arrays", &use_device_arrays);
}
