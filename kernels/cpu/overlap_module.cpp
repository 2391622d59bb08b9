// gradkit._cpu.compiled: what a call has to know of its arrays before it computes, and which of them
// share memory, by ranges of bytes alone.

#include <algorithm>
#include <unordered_map>

#include "module.h"
#include "table.h"
#include "tensors.h"

namespace nb = nanobind;

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

static void sort(Ranges& ranges) {
    const auto before = [](const Range& a, const Range& b) { return a.low < b.low; };
    if (!std::is_sorted(ranges.begin(), ranges.end(), before))
        std::sort(ranges.begin(), ranges.end(), before);
}

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

namespace {

// Ranges of the arrays that have elements. False if an array is not NumPy's, or cannot clearly be written;
// None is skipped.
bool append_plain(Ranges& ranges, const Sequence& arrays, bool written) {
    for (i64 k = 0, length = arrays.length(); k < length; ++k) {
        if (arrays[k] == Py_None) continue;
        if (!arrays.is_table() && !is_numpys(arrays[k])) return false;
        const Buffer buffer = arrays.buffer(k);
        if (written && (buffer->readonly || overlaps_itself(*buffer))) return false;
        append(ranges, *buffer, k, written);
    }
    return true;
}

// True if arrays are NumPy's, and those of the first list can clearly be written: each element is
// apart from all others of both lists.
bool apart(nb::handle written, nb::handle read) {
    Ranges ranges;
    return append_plain(ranges, Sequence(written), true)
        && append_plain(ranges, Sequence(read), false) && lie_apart(ranges);
}

// The different pairs of dtypes of two tables, as `Table::pairs_with` gives them, if each array has a
// partner of its shape at its place, and can be written apart from all others, except perhaps the very
// partner; -1 if that is not so, or not clear.
int fitting(const Table& written, const Table& others, bool may_be) {
    if (written.place() != others.place() || !written.has_places_of(others)) return -1;
    Ranges ranges;
    written.append_to(ranges, true);
    others.append_to(ranges, false, may_be ? &written : nullptr);
    return lie_apart(ranges) ? written.pairs_with(others) : -1;
}

// The positions of arrays in both lists whose ranges meet.
nb::list meetings(nb::handle written, nb::handle read) {
    Ranges ranges, open[2];  // those that may reach into the next one
    const Sequence lists[] = {Sequence(read), Sequence(written)};
    for (const bool side : {true, false})
        for (i64 k = 0, length = lists[side].length(); k < length; ++k)
            append(ranges, *lists[side].buffer(k), k, side);
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

PyObject* scalars;  // NumPy's class

// True of numbers that nothing can change: Python's, NumPy's scalars, and None.
bool is_plain(nb::handle value) {
    PyTypeObject* const kind = Py_TYPE(value.ptr());
    return value.is_none() || kind == &PyBool_Type || kind == &PyFloat_Type || kind == &PyLong_Type
        || PyType_IsSubtype(kind, reinterpret_cast<PyTypeObject*>(scalars));
}

// True of options that nothing can change: a tensor is an integer too, with a hash, and is written in
// place. Of tuples only those of words are options.
bool is_constant(nb::handle value) {
    PyObject* const object = value.ptr();
    return is_plain(value) || PyUnicode_CheckExact(object) || PyTuple_CheckExact(object)
        || PyType_Check(object);
}

// Items of a call: the first ones need no memory of their own.
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

// The first that is not None, or null.
nb::handle first_of(const Objects& values) {
    for (i64 k = 0; k < values.size(); ++k)
        if (!values[k].is_none()) return values[k];
    return nb::handle();
}

bool are_absent(const Objects& values) { return !first_of(values).is_valid(); }

bool are_constant(const Objects& options) {
    for (i64 k = 0; k < options.size(); ++k)
        if (!is_constant(options[k])) return false;
    return true;
}

// Notes an item that is None, or also one of the first, which are `written`, by a number less than any
// number of axes or dtype. False for any other, of which nothing is noted.
bool is_noted(const Objects& items, i64 written, i64 item, std::vector<i64>& numbers) {
    i64 number = items[item].is_none() ? -1 : 0;
    for (i64 k = 0; !number && item >= written && k < written; ++k)
        if (items[k].is(items[item])) number = -2 - k;
    if (number) numbers.push_back(number);
    return number != 0;
}

// The lists of a call: a table for each that is not absent, and what a plan depends on of them.
struct Lists {
    Objects tables;
    std::vector<i64> numbers;
    Ranges ranges;  // of all, if any is written
    bool written = false, are_numpys = true;

    // The first that is not absent, or null.
    const Table* first() const {
        const nb::handle table = first_of(tables);
        return table.is_valid() ? Table::in(table) : nullptr;
    }
};

// Reads a call's lists. `fields`: for each its name, whether it is written, whether its arrays are the
// partners of the first list's, then whether each may be the very array that it is a partner of; and
// whether it may be absent. `written`: whether the call writes arrays beside them. False if one has no
// table, or does not clearly fit.
bool read_lists(nb::handle call, nb::tuple fields, bool written, Lists& lists) {
    const Table* first = nullptr;
    for (nb::handle field : fields) {
        const auto is = [&](int k) { return field[k].is(nb::handle(Py_True)); };
        const bool writes = is(1), partner = is(2), may_be = is(3);
        const nb::object given = nb::getattr(call, field[0]);
        if (given.is_none()) {
            if (!is(4)) return false;
            lists.tables.push_back(given);
            lists.numbers.push_back(-1);
            continue;
        }
        const nb::object made = Table::of(given, false);
        if (made.is_none()) return false;
        const Table& table = *Table::in(made);
        lists.tables.push_back(made);
        lists.written = lists.written || writes;
        lists.numbers.push_back(table.place());
        if (!table.length() || (writes && !table.each_can_be_written())) return false;
        if (!first) first = &table;
        lists.are_numpys = table.are_numpys();
        if (table.place() != first->place()) return false;
        if (partner) {
            const int pairs = first->has_places_of(table) ? first->pairs_with(table) : -1;
            if (pairs < 0) return false;
            lists.numbers.push_back(pairs);
        }
        if (lists.written || written)
            table.append_to(lists.ranges, writes, may_be ? first : nullptr);
    }
    return true;
}

// True if numbers are plain or in arrays: of NumPy without axes, or beside those of the lists. What
// is written must lie apart from the latter, some of which are written too.
bool read_numbers(const Objects& numbers, bool written, Lists& lists, bool& are_plain) {
    for (i64 k = 0; k < numbers.size(); ++k) {
        PyObject* const number = numbers[k].ptr();
        if (is_plain(number)) continue;
        are_plain = false;
        Range range = {};
        if (is_numpys(number)) {
            const Buffer buffer(number);
            if (buffer->ndim) return false;
            const char* const data = static_cast<const char*>(buffer->buf);
            range = {data, data + buffer->len, k, true};
        } else if (!lists.first() || !lists.first()->is_beside(number, range)) {
            return false;
        }
        bool again = false;  // one array in the place of two numbers
        for (i64 j = 0; j < k; ++j) again = again || numbers[j].is(numbers[k]);
        if (!again && (written || lists.written)) lists.ranges.push_back(range);
    }
    return true;
}

// Key of a plan, from a call's lists and arrays.
struct Seen {
    std::vector<i64> numbers;
    Few<PyObject*> dtypes;  // borrowed
    bool are_tensors = false;
    int device = ON_HOST;
};

constexpr i64 ALIGNED = 16;  // bytes: no access of a kernel is wider

// The same as `see` of arrays of another library than NumPy. With `detach` those that are read may
// require grad. Tensors on a device, which are used by their addresses, must be aligned.
bool see_elsewhere(const Objects& arrays, i64 written, bool detach, Ranges& ranges, Seen& seen) {
    std::vector<i64>& numbers = seen.numbers;
    Table table;
    for (i64 k = 0; k < arrays.size(); ++k) {
        if (is_noted(arrays, written, k, numbers)) continue;
        PyObject* const array = arrays[k].ptr();
        if (!table.add(array, detach && k >= written)) return false;
        const i64 row = table.length() - 1;
        const Py_buffer buffer = table.buffer(row);
        const bool aligned = reinterpret_cast<uintptr_t>(buffer.buf) % ALIGNED == 0;
        if (table.are_tensors() && table.device() >= 0 && !aligned) return false;
        if (k < written && (buffer.readonly || overlaps_itself(buffer))) return false;
        if (written) append(ranges, buffer, k, k < written);
        numbers.push_back(table.dtype(row));
        numbers.push_back(buffer.ndim);
        numbers.insert(numbers.end(), buffer.shape, buffer.shape + 2 * buffer.ndim);
    }
    numbers.push_back(table.place());
    seen.are_tensors = table.are_tensors();
    seen.device = table.device();
    return lie_apart(ranges);
}

// Arrays, which may be None, by dtypes, shapes, strides and which are one; and before them what lists have to
// say. False if an array is of no library that is known here, or of another than the first or the lists; or
// if one of the first, which are `written`, cannot clearly be, or one of a list. `detach` as above.
bool see(const Objects& arrays, i64 written, bool detach, Lists& lists, Seen& seen) {
    std::vector<i64>& numbers = seen.numbers;
    Ranges& ranges = lists.ranges;
    numbers = std::move(lists.numbers);
    numbers.reserve(numbers.size() + 8 * arrays.size());
    const nb::handle first = first_of(arrays);
    if (first.is_valid() && !is_numpys(first.ptr()))
        return !lists.tables.size() && see_elsewhere(arrays, written, detach, ranges, seen);
    for (i64 k = 0; k < arrays.size(); ++k) {
        if (is_noted(arrays, written, k, numbers)) continue;
        PyObject* const array = arrays[k].ptr();
        if (!is_numpys(array)) return false;
        const Buffer buffer(array);
        if (k < written && (buffer->readonly || overlaps_itself(*buffer))) return false;
        if (written || lists.written) append(ranges, *buffer, k, k < written);
        numbers.push_back(buffer->ndim);
        numbers.insert(numbers.end(), buffer->shape, buffer->shape + buffer->ndim);
        numbers.insert(numbers.end(), buffer->strides, buffer->strides + buffer->ndim);
        seen.dtypes.push_back(dtype_of(array).ptr());
    }
    return lie_apart(ranges);
}

// All that a plan depends on: what computes, a call's options and their types, and what was seen.
nb::object key_of(nb::handle backend, const Objects& options, const Seen& seen) {
    std::vector<i64> numbers = seen.numbers;
    Few<PyObject*> key;  // borrowed
    key.push_back(backend.ptr());
    for (i64 k = 0; k < options.size(); ++k) {
        key.push_back(options[k].ptr());
        // 1 is not True. No other type is at this address while the key holds the option.
        numbers.push_back(reinterpret_cast<i64>(options[k].type().ptr()));
    }
    for (i64 k = 0; k < seen.dtypes.size(); ++k) key.push_back(seen.dtypes[k]);
    const nb::bytes all(numbers.data(), numbers.size() * sizeof(i64));
    key.push_back(all.ptr());
    const nb::object made = nb::steal(PyTuple_New(key.size()));
    for (i64 k = 0; k < key.size(); ++k) {
        Py_INCREF(key[k]);
        if (PyTuple_SetItem(made.ptr(), k, key[k])) throw nb::python_error();
    }
    return made;
}

nb::object signature(nb::handle backend, nb::tuple options, nb::tuple arrays, i64 written) {
    Objects own, given;
    Lists none;
    Seen seen;
    append(own, options);
    append(given, arrays);
    const bool usual = are_constant(own) && see(given, written, true, none, seen);
    return usual ? key_of(backend, own, seen) : nb::none();
}

// The last call of a class whose plan was found: if all is the same, so is the plan, and no key is made.
// What is let go may run code, which sees all in place, and waits for no lock.
class Last {
public:
    // Knows no calls any more, as whoever has no plans.
    static void forget() {
        std::unordered_map<PyObject*, Last> known;
        const nb::ft_lock_guard lock(mutex);
        known.swap(all());
    }

    // The plan of a call of this class, or null.
    static nb::object plan_for(
        nb::handle kind, nb::handle backend, const Objects& options, const Seen& seen
    ) {
        const nb::ft_lock_guard lock(mutex);
        return all()[kind.ptr()].plan_for(backend, options, seen);
    }

    static void set(
        nb::handle kind, nb::handle backend, const Objects& options, const Seen& seen,
        nb::handle plan
    ) {
        Last last;
        for (i64 k = 0; k < options.size(); ++k) last.options_.push_back(options[k]);
        for (i64 k = 0; k < seen.dtypes.size(); ++k)
            last.dtypes_.push_back(nb::borrow(seen.dtypes[k]));
        last.numbers_ = seen.numbers;
        last.backend_ = nb::borrow(backend);
        last.plan_ = nb::borrow(plan);
        const nb::ft_lock_guard lock(mutex);
        std::swap(all()[kind.ptr()], last);
    }

private:
    nb::object plan_for(nb::handle backend, const Objects& options, const Seen& seen) const {
        const i64 dtypes = static_cast<i64>(dtypes_.size());
        bool same = backend.is(backend_) && seen.dtypes.size() == dtypes && seen.numbers == numbers_;
        for (i64 k = 0; same && k < options.size(); ++k) same = options[k].is(options_[k]);
        for (i64 k = 0; same && k < dtypes; ++k) same = dtypes_[k].is(seen.dtypes[k]);
        return same ? plan_ : nb::object();
    }

    static std::unordered_map<PyObject*, Last>& all() {
        static auto* const lasts = new std::unordered_map<PyObject*, Last>;  // classes are never freed
        return *lasts;
    }

    static inline nb::ft_mutex mutex;

    nb::object backend_, plan_;
    std::vector<nb::object> options_, dtypes_;
    std::vector<i64> numbers_;
};

// Appends a call's fields of some names.
void read_fields(nb::handle call, nb::handle fields, Objects& into) {
    for (nb::handle name : nb::borrow<nb::tuple>(fields)) {
        if (name.ptr() == attributes.class_) {  // told sooner by itself
            into.push_back(nb::borrow(call.type()));
            continue;
        }
        PyObject* const value = PyObject_GetAttr(call.ptr(), name.ptr());
        if (!value) throw nb::python_error();
        into.push_back(nb::steal(value));
    }
}

// True if values are the very ones that are known, the first of a tuple; None if none are.
bool are_those(const Objects& values, nb::handle known) {
    if (known.is_none()) return false;
    for (i64 k = 0; k < values.size(); ++k)
        if (!values[k].is(known[k])) return false;
    return true;
}

// The plan of a call, by a key as above, if the numbers that no plan depends on are the very ones that
// passed their checks in the last call; those that a check changes are changed again. Else the plan, or
// None; the key, or None; the numbers, to be checked; and whether none is in an array. The call then has
// tables in the place of its lists, if all have one.
nb::object known(nb::dict plans, nb::handle backend, nb::handle call, nb::tuple names, nb::tuple outs) {
    Objects options, passed, arrays, rare;
    Lists lists;
    Seen seen;
    append(arrays, outs);
    read_fields(call, names[5], rare);
    read_fields(call, names[0], options);
    read_fields(call, names[1], passed);
    read_fields(call, names[2], arrays);
    const i64 written = static_cast<i64>(outs.size()) + nb::cast<i64>(names[3]);
    nb::object plan, key = nb::none();
    const nb::tuple fields = nb::borrow<nb::tuple>(names[4]);
    const bool detach = names[6].is(nb::handle(Py_True));
    bool plain = true;
    const bool usual = are_absent(rare) && are_constant(options)
        && read_lists(call, fields, written > 0, lists)
        && read_numbers(passed, written > 0, lists, plain)
        && (lists.are_numpys || are_absent(arrays)) && see(arrays, written, detach, lists, seen)
        && !(seen.are_tensors && names[7].is(nb::handle(Py_True)));  // values are read of views
    if (usual) {
        for (i64 k = 0; k < lists.tables.size(); ++k)
            nb::setattr(call, nb::handle(fields[k])[0], lists.tables[k]);
        if (!PyDict_Size(plans.ptr())) Last::forget();
        plan = Last::plan_for(call.type(), backend, options, seen);
        if (!plan.is_valid()) {
            key = key_of(backend, options, seen);
            try {
                plan = plans.get(key, nb::handle());
                if (plan.is_valid()) Last::set(call.type(), backend, options, seen, plan);
            } catch (nb::python_error& error) {  // an option that has no hash
                if (!error.matches(PyExc_TypeError)) throw;
                key = nb::none();
            }
        }
    }
    if (!plan.is_valid()) {
        plan = nb::none();
    } else if (!passed.size()) {
        return plan;
    } else {
        const nb::object known = nb::getattr(plan, nb::handle(attributes.passed));
        if (are_those(passed, known)) {
            for (nb::handle changed : nb::borrow<nb::tuple>(known[passed.size()]))
                nb::setattr(call, changed[0], changed[1]);
            return plan;
        }
    }
    nb::list all;
    for (i64 k = 0; k < passed.size(); ++k) all.append(passed[k]);
    return nb::make_tuple(plan, key, nb::tuple(all), plain);
}

// Key of a plan, from tensors on the host, which may be None; None if compiled code cannot use them
// as they are, or if one of the first, which are `written`, cannot clearly be.
nb::object described_tensors(nb::tuple arrays, i64 written) {
    Objects given;
    append(given, arrays);
    Ranges ranges;
    Seen seen;
    const bool usual = see_elsewhere(given, written, true, ranges, seen) && seen.are_tensors && seen.device < 0;
    return usual ? nb::object(nb::bytes(seen.numbers.data(), seen.numbers.size() * sizeof(i64))) : nb::none();
}

}  // namespace

void define_overlap(nb::module_& module) {
    scalars = nb::object(nb::module_::import_("numpy").attr("generic")).release().ptr();
    module.def("apart", &apart);
    module.def("fitting", &fitting);
    module.def("meetings", &meetings);
    module.def("signature", &signature);
    module.def("known", &known);
    module.def("described_tensors", &described_tensors);
}
