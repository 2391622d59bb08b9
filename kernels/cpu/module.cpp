// gradkit._cpu.compiled: the compiled operations, on objects that have Python's buffer protocol.
//
// Arguments are validated before (gradkit/_calls/backend.py).

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <cstring>

#include "channel_calls.h"
#include "exact_module.h"
#include "module.h"
#include "operation.h"
#include "results.h"
#include "row_calls.h"
#include "statistics.h"
#include "tensors.h"
#ifdef GRADKIT_X86_64
#include "processor.h"
#endif

namespace nb = nanobind;

namespace {

struct InstructionSet {
    const char* name;
    const RowKernels* rows;
    const ChannelKernels<float>* channels_f32;
    const ChannelKernels<double>* channels_f64;
    const ListKernels* lists;
    AddExactly exact;
    bool (*is_there)();
};

#define KERNELS(set)                                                                     \
    set::row_kernels, set::channel_kernels_f32, &set::channel_kernels_f64, &set::list_kernels, \
        set::add_exactly

#ifdef GRADKIT_X86_64
const InstructionSet instruction_sets[] = {
    {"x86-64-v4", KERNELS(x86_64_v4), [] { return x86_64_level() >= 4; }},
    {"x86-64-v3", KERNELS(x86_64_v3), [] { return x86_64_level() >= 3; }},
    {"x86-64", KERNELS(baseline), [] { return true; }},
};
#else
const InstructionSet instruction_sets[] = {
    {"baseline", KERNELS(baseline), [] { return true; }},
};
#endif

// The widest that this processor has, unless another was asked for.
std::atomic<const InstructionSet*> chosen{nullptr};

nb::list available() {
    nb::list names;
    for (const InstructionSet& each : instruction_sets)
        if (each.is_there()) names.append(each.name);
    return names;
}

void use_instruction_set(const char* name) {
    for (const InstructionSet& each : instruction_sets)
        if (std::strcmp(each.name, name) == 0 && each.is_there()) {
            chosen.store(&each);
            return;
        }
    throw nb::value_error("no such instruction set on this processor");
}

const char* instruction_set() { return chosen.load()->name; }

// Neighbouring axes that one stride leads through are one; axes of length 1 are none.
void merge(const Py_buffer& buffer, int begin, int end, Axes& axes) {
    axes.count = 0;
    for (int k = begin; k < end; ++k) {
        const Axis axis = {buffer.shape[k], buffer.strides[k]};
        if (axis.length == 1) continue;
        Axis* outer = axes.count ? &axes.at[axes.count - 1] : nullptr;
        if (outer && outer->stride == axis.length * axis.stride)
            *outer = {outer->length * axis.length, axis.stride};
        else
            axes.at[axes.count++] = axis;
    }
}

i64 length_of(const Py_buffer& buffer, int begin, int end) {
    i64 length = 1;
    for (int k = begin; k < end; ++k) length *= buffer.shape[k];
    return length;
}

// An array's memory, for as long as this lives.
class Memory {
public:
    // Axes up to `axis`, counted from the end if it is negative, lead from row to row; axes of length
    // 1 may follow in a statistic.
    Memory(Given given, int axis) {
        if (given.is_none()) return;
        python_ = given.is_python();
        given.open(buffer_, strides_);
        if (axis < 0) axis += buffer_.ndim;
        array_.data = static_cast<char*>(buffer_.buf);
        merge(buffer_, 0, axis, array_.rows);
        merge(buffer_, axis, buffer_.ndim, array_.columns);
        there_ = true;
    }

    ~Memory() {
        if (there_) PyBuffer_Release(&buffer_);  // of what has an owner
    }

    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    bool is_there() const { return there_; }
    bool of_python() const { return python_; }
    operator const Array*() const { return there_ ? &array_ : nullptr; }
    const Py_buffer& buffer() const { return buffer_; }

    // An axis of this array, for parameters that may have fewer axes in front.
    int from_end(int axis) const { return axis - buffer_.ndim; }

    i64 rows() const {
        i64 rows = 1;
        for (int k = 0; there_ && k < array_.rows.count; ++k) rows *= array_.rows.at[k].length;
        return rows;
    }

private:
    bool there_ = false, python_ = false;
    Py_buffer buffer_;
    Py_ssize_t strides_[MOST_AXES];
    Array array_;
};

// From so many elements on, other Python threads may run meanwhile.
constexpr i64 WORTH_RELEASING = 1 << 12;

// Makes a call on so many elements of arrays such as `data`; run(patience) is false if it was given
// up. XLA's threads have no lock of Python's.
template <typename F> void compute(i64 elements, const Memory& data, F run) {
    if (elements < WORTH_RELEASING || !data.of_python()) {
        Patience patience(nullptr);
        run(patience);
        return;
    }
    bool done;
    {
        const WithoutGil released;
        Patience patience(interrupted);
        done = run(patience);
    }
    if (!done) throw nb::python_error();
}

Setting setting_of(const Memory& data, const Memory& scale) {
    Setting setting;
    setting.kernels = chosen.load(std::memory_order_relaxed)->rows;
    setting.rows = data.rows();
    setting.samples = scale.rows();
    setting.threads = threads_to_use();
    return setting;
}

// The dtypes of a call: of the data, of what is known, of parameters, of results for each channel,
// and of running statistics.
enum Kind { DATA, KNOWN, PARAMETER, RESULT, RUNNING };

Dtype dtype_of(int types, Kind kind) { return static_cast<Dtype>(types >> 2 * kind & 3); }

Rows rows_of(
    int types, int axis, const Memory& data, const Memory& scale, double offset, const Memory& bias,
    double absent_bias = 0
) {
    const Py_buffer& buffer = data.buffer();
    const Dtype parameters = dtype_of(types, PARAMETER);
    Rows rows = {};
    rows.dtype = dtype_of(types, DATA);
    rows.width = length_of(buffer, axis, buffer.ndim);
    rows.scale = {parameters, scale, scale.is_there() ? offset : 1};
    rows.bias = {parameters, bias, bias.is_there() ? 0 : absent_bias};
    return rows;
}

template <typename C, typename... Further> void compute(
    bool (*run)(const Setting&, C, Further...), Setting setting, const Memory& data, const C& call,
    Further... further
) {
    compute(setting.rows * call.width, data, [&](Patience& patience) {
        setting.patience = &patience;
        return run(setting, call, further...);
    });
}

void forward(
    int types, int axis, double eps, double scale_offset, Given x, Given residual, Given scale,
    Given bias, Given y, Given s, Given mean, Given inv_std
) {
    const Memory x_(x, axis), residual_(residual, axis), y_(y, axis), s_(s, axis);
    const Memory mean_(mean, axis), inv_std_(inv_std, axis);
    const Memory scale_(scale, x_.from_end(axis)), bias_(bias, x_.from_end(axis));
    // Added to -0, it leaves the sign.
    const double absent_bias = -0.0;
    const Forward call = {
        rows_of(types, axis, x_, scale_, scale_offset, bias_, absent_bias), eps, x_, residual_, y_,
        s_, mean_, inv_std_,
    };
    compute(run_forward, setting_of(x_, scale_), x_, call);
}

constexpr bool FROM_INPUT = false, FROM_OUTPUT = true, NOT_CENTRED = false, CENTRED = true;

void gradient(
    int types, int axis, bool from_output, bool centred, double scale_offset, Given dy,
    Given source, Given scale, Given bias, Given mean, Given inv_std, Given ds, Given dx,
    Given dscale, Given dbias
) {
    const Memory dy_(dy, axis), source_(source, axis), ds_(ds, axis), dx_(dx, axis);
    const Memory mean_(mean, axis), inv_std_(inv_std, axis);
    const int own = dy_.from_end(axis);
    const Memory scale_(scale, own), bias_(bias, own), dscale_(dscale, own), dbias_(dbias, own);
    const Gradient call = {
        rows_of(types, axis, dy_, scale_, scale_offset, bias_), from_output, centred, false, dy_,
        source_, ds_, mean_, inv_std_, dx_, nullptr,
    };
    compute<Gradient, const Array*, const Array*>(
        run_gradient, setting_of(dy_, scale_), dy_, call, dscale_, dbias_
    );
}

void layer_norm_inverse(
    int types, int axis, Given y, Given scale, Given bias, Given mean, Given inv_std, Given x
) {
    const Memory y_(y, axis), x_(x, axis), mean_(mean, axis), inv_std_(inv_std, axis);
    const Memory scale_(scale, 0), bias_(bias, 0);
    const Inverse call = {
        rows_of(types, axis, y_, scale_, 0, bias_), y_, mean_, inv_std_, x_,
    };
    compute(run_inverse, setting_of(y_, scale_), y_, call);
}

void gated_rms_norm(
    int types, int axis, double eps, double scale_offset, bool silu, bool norm_before_gate, Given x,
    Given gate, Given scale, Given y, Given inv_std
) {
    const Memory x_(x, axis), gate_(gate, axis), y_(y, axis), inv_std_(inv_std, axis);
    const Memory scale_(scale, 0), bias(Given(), 0);
    const GatedForward call = {
        {rows_of(types, axis, x_, scale_, scale_offset, bias), silu, norm_before_gate}, eps, x_,
        gate_, y_, inv_std_,
    };
    compute(run_gated_forward, setting_of(x_, scale_), x_, call);
}

void gated_rms_norm_grad(
    int types, int axis, double scale_offset, bool silu, bool norm_before_gate, Given dy, Given x,
    Given gate, Given scale, Given inv_std, Given dx, Given dgate, Given dscale
) {
    const Memory dy_(dy, axis), x_(x, axis), gate_(gate, axis), inv_std_(inv_std, axis);
    const Memory dx_(dx, axis), dgate_(dgate, axis);
    const Memory scale_(scale, 0), dscale_(dscale, 0), bias(Given(), 0);
    const GatedGradient call = {
        {rows_of(types, axis, dy_, scale_, scale_offset, bias), silu, norm_before_gate}, false,
        dy_, x_, gate_, inv_std_, dx_, dgate_, nullptr,
    };
    compute<GatedGradient, const Array*>(
        run_gated_gradient, setting_of(dy_, scale_), dy_, call, dscale_
    );
}

View view_of(const Memory& memory) {
    View view;
    const Array* array = memory;
    view.data = array ? array->data : nullptr;
    view.axes.count = array ? memory.buffer().ndim : 0;
    for (int k = 0; k < view.axes.count; ++k)
        view.axes.at[k] = {memory.buffer().shape[k], memory.buffer().strides[k]};
    return view;
}

Numbers numbers_of(Dtype dtype, const Memory& memory) {
    const Array* array = memory;
    if (!array) return {};
    const Py_buffer& buffer = memory.buffer();
    const int last = buffer.ndim - 1;
    if (last < 0) return {dtype, array->data, {1, 0}, 0};
    const Axis inner = {buffer.shape[last], buffer.strides[last]};
    return {dtype, array->data, inner, last ? buffer.strides[0] : 0};
}

// Arguments of all norms over channels.
class ChannelArguments {
public:
    ChannelArguments(int types, int axis, i64 groups, double eps) : types_(types) {
        const InstructionSet* set = chosen.load(std::memory_order_relaxed);
        call.f32 = set->channels_f32;
        call.f64 = set->channels_f64;
        call.lists = set->lists;
        call.threads = threads_to_use();
        call.dtype = dtype_of(types, DATA);
        call.axis = axis;
        call.groups = groups;
        call.eps = eps;
    }

    Numbers numbers(Kind kind, const Memory& memory) const {
        return numbers_of(dtype_of(types_, kind), memory);
    }
    Numbers known(const Memory& memory) const { return numbers(KNOWN, memory); }
    Numbers parameter(const Memory& memory) const { return numbers(PARAMETER, memory); }
    Numbers result(const Memory& memory) const { return numbers(RESULT, memory); }
    Numbers running(const Memory& memory) const { return numbers(RUNNING, memory); }

    void compute_on(const Memory& data) {
        compute(length_of(data.buffer(), 0, data.buffer().ndim), data, [&](Patience& patience) {
            call.patience = &patience;
            call.channels = call.x.axes.at[call.axis].length;
            return run_channels(call);
        });
    }

    ChannelCall call;

private:
    int types_;
};

void channel_norm(
    int types, int axis, i64 groups, double eps, double momentum, Given x, Given scale, Given bias,
    Given mean, Given var, Given y, Given saved_mean, Given saved_inv_std, Given saved_var,
    Given running_mean, Given running_var
) {
    const Memory x_(x, 0), y_(y, 0), scale_(scale, 0), bias_(bias, 0), mean_(mean, 0), var_(var, 0);
    const Memory means(saved_mean, 0), inv_stds(saved_inv_std, 0), vars(saved_var, 0);
    const Memory running_mean_(running_mean, 0), running_var_(running_var, 0);
    ChannelArguments own(types, axis, groups, eps);
    ChannelCall& call = own.call;
    call.reads = var.is_none() ? Reads::DEVIATIONS : Reads::NOTHING;
    call.writes = y.is_none() ? Writes::NOTHING : Writes::NORMALISED;
    call.x = view_of(x_);
    call.out = view_of(y_);
    call.scale = own.parameter(scale_);
    call.bias = own.parameter(bias_);
    call.mean = own.known(mean_);
    call.var = own.known(var_);
    call.saved_mean = own.result(means);
    call.saved_inv_std = own.result(inv_stds);
    call.saved_var = own.result(vars);
    call.running_mean = own.running(running_mean_);
    call.running_var = own.running(running_var_);
    call.momentum = momentum;
    own.compute_on(x_);
}

void channel_gradient(
    int types, int axis, i64 groups, double eps, double count, Given dy, Given x, Given scale,
    Given mean, Given inv_std, Given var, Given of_product, Given of_dy, Given dx,
    Given sum_product, Given sum_dy
) {
    const Memory dy_(dy, 0), x_(x, 0), dx_(dx, 0), scale_(scale, 0), mean_(mean, 0);
    const Memory inv_std_(inv_std, 0), var_(var, 0), of_product_(of_product, 0), of_dy_(of_dy, 0);
    const Memory sum_product_(sum_product, 0), sum_dy_(sum_dy, 0);
    ChannelArguments own(types, axis, groups, eps);
    ChannelCall& call = own.call;
    const bool constant = !var.is_none(), summed = !sum_product.is_none() || !sum_dy.is_none();
    const bool known = constant || !of_dy.is_none();
    call.reads = known && !summed ? Reads::NOTHING : Reads::PRODUCTS;
    call.writes = dx.is_none() ? Writes::NOTHING
        : constant             ? Writes::MULTIPLIED
                               : Writes::DIFFERENTIATED;
    call.dy = view_of(dy_);
    call.x = view_of(x_);
    call.out = view_of(dx_);
    call.scale = own.parameter(scale_);
    call.mean = own.known(mean_);
    call.inv_std = own.known(inv_std_);
    call.var = own.known(var_);
    call.of_product = numbers_of(F64, of_product_);
    call.of_dy = numbers_of(F64, of_dy_);
    call.count = count;
    call.sum_product = own.result(sum_product_);
    call.sum_dy = own.result(sum_dy_);
    own.compute_on(x_);
}

void update_running_statistics(
    int types, double count, double momentum, Given running_mean, Given running_var, Given mean,
    Given var, Given next_mean, Given next_var
) {
    const Memory present(running_mean, 0), present_var(running_var, 0), mean_(mean, 0), var_(var, 0);
    const Memory next(next_mean, 0), next_var_(next_var, 0);
    const Dtype own = dtype_of(types, RUNNING);
    const Statistics now = {numbers_of(own, present), numbers_of(own, present_var)};
    const Statistics batch = {numbers_of(F64, mean_), numbers_of(F64, var_)};
    const Statistics moved = {numbers_of(own, next), numbers_of(own, next_var_)};
    compute(now.mean.inner.length, present, [&](Patience&) {
        move_statistics(list_kernels(), now, batch, count, momentum, moved);
        return true;
    });
}

void combine_stats(
    int, Given means, Given variances, Given counts, Given mean, Given var, Given total
) {
    const Memory means_(means, 0), variances_(variances, 0), counts_(counts, 0);
    const Memory mean_(mean, 0), var_(var, 0), total_(total, 0);
    const Statistics ranks = {numbers_of(F64, means_), numbers_of(F64, variances_)};
    const Statistics all = {numbers_of(F64, mean_), numbers_of(F64, var_)};
    const Numbers of_ranks = numbers_of(F64, counts_), count = numbers_of(F64, total_);
    const i64 channels = all.mean.inner.length;
    compute(channels * of_ranks.inner.length, means_, [&](Patience&) {
        set_number(count, 0, combine_statistics(ranks, channels, of_ranks, all));
        return true;
    });
}

// The other operations. Each takes the fields of its record (gradkit/_calls) in their order there:
// numbers, arguments, results.

const Given none;

void layer_norm(
    int types, int axis, double eps, double scale_offset, Given x, Given scale, Given bias, Given y,
    Given mean, Given inv_std
) {
    forward(types, axis, eps, scale_offset, x, none, scale, bias, y, none, mean, inv_std);
}

void add_layer_norm(
    int types, int axis, double eps, double scale_offset, Given x, Given residual, Given scale,
    Given bias, Given y, Given s, Given mean, Given inv_std
) {
    forward(types, axis, eps, scale_offset, x, residual, scale, bias, y, s, mean, inv_std);
}

void rms_norm(
    int types, int axis, double eps, double scale_offset, Given x, Given scale, Given y,
    Given inv_std
) {
    forward(types, axis, eps, scale_offset, x, none, scale, none, y, none, none, inv_std);
}

void add_rms_norm(
    int types, int axis, double eps, double scale_offset, Given x, Given residual, Given scale,
    Given y, Given s, Given inv_std
) {
    forward(types, axis, eps, scale_offset, x, residual, scale, none, y, s, none, inv_std);
}

void layer_norm_grad(
    int types, int axis, double scale_offset, Given dy, Given x, Given scale, Given mean,
    Given inv_std, Given ds, Given dx, Given dscale, Given dbias
) {
    gradient(
        types, axis, FROM_INPUT, CENTRED, scale_offset, dy, x, scale, none, mean, inv_std, ds, dx,
        dscale, dbias
    );
}

void rms_norm_grad(
    int types, int axis, double scale_offset, Given dy, Given x, Given scale, Given inv_std,
    Given ds, Given dx, Given dscale
) {
    gradient(
        types, axis, FROM_INPUT, NOT_CENTRED, scale_offset, dy, x, scale, none, none, inv_std, ds,
        dx, dscale, none
    );
}

void invertible_layer_norm_grad(
    int types, int axis, Given dy, Given y, Given scale, Given bias, Given inv_std, Given dx,
    Given dscale, Given dbias
) {
    gradient(
        types, axis, FROM_OUTPUT, CENTRED, 0, dy, y, scale, bias, none, inv_std, none, dx, dscale,
        dbias
    );
}

void invertible_rms_norm_grad(
    int types, int axis, double scale_offset, Given dy, Given y, Given scale, Given inv_std,
    Given ds, Given dx, Given dscale
) {
    gradient(
        types, axis, FROM_OUTPUT, NOT_CENTRED, scale_offset, dy, y, scale, none, none, inv_std, ds,
        dx, dscale, none
    );
}

void batch_norm(
    int types, int channel_axis, double eps, double momentum, Given x, Given scale, Given bias,
    Given running_mean, Given running_var, Given y, Given mean, Given inv_std, Given var
) {
    channel_norm(
        types, channel_axis, 0, eps, momentum, x, scale, bias, none, none, y, mean, inv_std, var,
        running_mean, running_var
    );
}

void batch_norm_inference(
    int types, int channel_axis, double eps, Given x, Given scale, Given bias, Given mean,
    Given var, Given y
) {
    channel_norm(
        types, channel_axis, 0, eps, 0, x, scale, bias, mean, var, y, none, none, none, none, none
    );
}

void batch_norm_stats(int types, int channel_axis, Given x, Given mean, Given var) {
    channel_norm(
        types, channel_axis, 0, 0, 0, x, none, none, none, none, none, mean, none, var, none, none
    );
}

void batch_norm_apply(
    int types, int channel_axis, double eps, Given x, Given scale, Given bias, Given mean,
    Given var, Given y, Given saved_mean, Given inv_std
) {
    channel_norm(
        types, channel_axis, 0, eps, 0, x, scale, bias, mean, var, y, saved_mean, inv_std, none,
        none, none
    );
}

void group_norm(
    int types, i64 num_groups, int channel_axis, double eps, Given x, Given scale, Given bias,
    Given y, Given mean, Given inv_std
) {
    channel_norm(
        types, channel_axis, num_groups, eps, 0, x, scale, bias, none, none, y, mean, inv_std, none,
        none, none
    );
}

void batch_norm_grad(
    int types, int channel_axis, Given dy, Given x, Given scale, Given mean, Given inv_std,
    Given dx, Given dscale, Given dbias
) {
    channel_gradient(
        types, channel_axis, 0, 0, 0, dy, x, scale, mean, inv_std, none, none, none, dx, dscale,
        dbias
    );
}

void batch_norm_inference_grad(
    int types, int channel_axis, double eps, Given dy, Given x, Given scale, Given mean, Given var,
    Given dx, Given dscale, Given dbias
) {
    channel_gradient(
        types, channel_axis, 0, eps, 0, dy, x, scale, mean, none, var, none, none, dx, dscale, dbias
    );
}

void batch_norm_grad_sums(
    int types, int channel_axis, Given dy, Given x, Given mean, Given inv_std, Given sum_dy_xhat,
    Given sum_dy
) {
    channel_gradient(
        types, channel_axis, 0, 0, 0, dy, x, none, mean, inv_std, none, none, none, none,
        sum_dy_xhat, sum_dy
    );
}

void batch_norm_grad_apply(
    int types, double count, int channel_axis, Given dy, Given x, Given scale, Given mean,
    Given inv_std, Given sum_dy_xhat, Given sum_dy, Given dx
) {
    channel_gradient(
        types, channel_axis, 0, 0, count, dy, x, scale, mean, inv_std, none, sum_dy_xhat, sum_dy,
        dx, none, none
    );
}

void group_norm_grad(
    int types, int channel_axis, Given dy, Given x, Given scale, Given mean, Given inv_std,
    Given dx, Given dscale, Given dbias
) {
    const Memory mean_(mean, 0);
    channel_gradient(
        types, channel_axis, mean_.buffer().shape[1], 0, 0, dy, x, scale, mean, inv_std, none, none,
        none, dx, dscale, dbias
    );
}

// The calls that `work` makes, none of which is made: tuples of a name and its arguments.
nb::list calls_of(nb::callable work) {
    nb::list calls;
    struct Noting {
        explicit Noting(nb::list* list) { noted = list; }
        ~Noting() { noted = nullptr; }
    } noting(&calls);
    work();
    return calls;
}

}  // namespace

AddExactly exact_kernel() { return chosen.load(std::memory_order_relaxed)->exact; }

const ListKernels& list_kernels() { return *chosen.load(std::memory_order_relaxed)->lists; }

thread_local nb::list* noted = nullptr;

bool interrupted() {
    return or_wait_for_the_end([] {
        const PyGILState_STATE before = PyGILState_Ensure();  // nanobind's own guard may not throw
        const bool raised = PyErr_CheckSignals() != 0;
        PyGILState_Release(before);
        return raised;
    });
}

NB_MODULE(compiled, module) {
    define_memory();
    nb::set_leak_warnings(false);  // whoever ends the interpreter within a call leaves its table
    for (const InstructionSet& each : instruction_sets)
        if (!chosen.load() && each.is_there()) chosen.store(&each);
    module.def("instruction_sets", &available);
    module.def("instruction_set", &instruction_set);
    module.def("use_instruction_set", &use_instruction_set);
    module.def("calls_of", &calls_of);
    module.def("use_threads", &use_threads);
    module.def("use_openmp", &use_openmp);
    module.attr("xla_handlers") = nb::dict();
    define<layer_norm>(module, "layer_norm");
    define<add_layer_norm>(module, "add_layer_norm");
    define<rms_norm>(module, "rms_norm");
    define<add_rms_norm>(module, "add_rms_norm");
    define<gated_rms_norm>(module, "gated_rms_norm");
    define<layer_norm_inverse>(module, "layer_norm_inverse");
    define<layer_norm_grad>(module, "layer_norm_grad");
    define<rms_norm_grad>(module, "rms_norm_grad");
    define<invertible_layer_norm_grad>(module, "invertible_layer_norm_grad");
    define<invertible_rms_norm_grad>(module, "invertible_rms_norm_grad");
    define<gated_rms_norm_grad>(module, "gated_rms_norm_grad");
    define<batch_norm>(module, "batch_norm");
    define<batch_norm_inference>(module, "batch_norm_inference");
    define<batch_norm_stats>(module, "batch_norm_stats");
    define<batch_norm_apply>(module, "batch_norm_apply");
    define<group_norm>(module, "group_norm");
    define<batch_norm_grad>(module, "batch_norm_grad");
    define<batch_norm_inference_grad>(module, "batch_norm_inference_grad");
    define<batch_norm_grad_sums>(module, "batch_norm_grad_sums");
    define<batch_norm_grad_apply>(module, "batch_norm_grad_apply");
    define<group_norm_grad>(module, "group_norm_grad");
    define<update_running_statistics>(module, "update_running_statistics");
    define<combine_stats>(module, "combine_stats");
    define_lists(module);
    define_overlap(module);
    define_results(module);
    define_table(module);
    define_tensors(module);
    define_xla_lists(module);
    bind_exact_sums(module);
}
