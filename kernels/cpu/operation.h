// Operations that Python calls on tensors and objects with its buffer protocol, and XLA on its own
// buffers.

#pragma once

#include <nanobind/nanobind.h>

#include <tuple>
#include <type_traits>
#include <vector>

#include "environment.h"
#include "memory.h"
#include "xla_call.h"

// An array that an operation is given, which may be absent.
class Given {
public:
    Given() = default;
    Given(nanobind::handle object) : object_(object) {}
    explicit Given(const Py_buffer& memory) : memory_(memory) {}  // XLA's

    bool is_python() const { return object_.is_valid(); }
    bool is_none() const { return !memory_.buf && (!object_.is_valid() || object_.is_none()); }

    // As open_memory.
    void open(Py_buffer& buffer, Py_ssize_t (&strides)[MOST_AXES]) const {
        if (memory_.buf)
            buffer = memory_;
        else
            open_memory(object_.ptr(), buffer, strides);
    }

private:
    Py_buffer memory_ = {};
    nanobind::handle object_;
};

// A list in which calls of this thread are noted down instead of being made; null if they are made.
extern thread_local nanobind::list* noted;

template <typename A> using OfPython =
    std::conditional_t<std::is_same_v<A, Given>, nanobind::handle, A>;

// The arguments of an operation, one after the other. Numbers are in the attribute "numbers". Arrays
// are in "arrays": the place among operands and results, or -1 for an absent one; where it begins in
// that, in bytes; the number of axes; lengths; and strides in bytes.
class XlaArguments {
public:
    explicit XlaArguments(const XlaCall& call)
        : call_(call), number_(call.attribute<double>("numbers")) {
        const XlaNumbers& arrays = call.numbers("arrays");
        const i64* first = static_cast<const i64*>(arrays.data);
        arrays_.assign(first, first + arrays.count);
        array_ = arrays_.data();
    }

    template <typename A> A next() {
        if constexpr (std::is_same_v<A, Given>) {
            return next_array();
        } else {
            return static_cast<A>(*number_++);
        }
    }

private:
    Given next_array() {
        const i64 place = *array_++;
        if (place < 0) return {};
        Py_buffer buffer = {};
        buffer.buf = call_.data(place) + *array_++;
        buffer.ndim = static_cast<int>(*array_++);
        buffer.shape = array_;
        buffer.strides = array_ + buffer.ndim;
        array_ = buffer.strides + buffer.ndim;
        if (buffer.ndim) buffer.shape[0] *= call_.examples(place);
        return Given(buffer);
    }

    const XlaCall& call_;
    const double* number_;
    std::vector<Py_ssize_t> arrays_;
    Py_ssize_t* array_;
};

// Arrays may be None; no number takes that.
template <typename> auto may_be_none() { return nanobind::arg().none(); }

template <auto run> struct Operation;

template <typename... A, void (*run)(A...)> struct Operation<run> {
    static inline const char* name;

    static void call(OfPython<A>... given) {
        if (noted) {
            noted->append(nanobind::make_tuple(name, given...));
            return;
        }
        const DefaultEnvironment environment;
        run(given...);
    }

    static void define(nanobind::module_& module) { module.def(name, &call, may_be_none<A>()...); }

    static XlaError* xla(XlaFrame* frame) {
        return on_each_example(frame, [](const XlaCall& call) {
            XlaArguments arguments(call);
            const std::tuple<A...> all{arguments.next<A>()...};  // in order
            std::apply(run, all);
        });
    }
};

template <auto run> void define(nanobind::module_& module, const char* name) {
    Operation<run>::name = name;
    Operation<run>::define(module);
    module.attr("xla_handlers")[name] = nanobind::capsule(
        reinterpret_cast<const void*>(&Operation<run>::xla)
    );
}
