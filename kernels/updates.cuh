// Steps of optimisers for one element, on GPUs and CPUs: the same bits by the same operations.
//
// A file that includes this defines INLINE, numbers N whose operations each round once, root_of, is_zero and
// is_positive for them, and as_number<N>, which rounds a double. A step is of a number, or of a vector V of them.
// gradkit/_numpy/updates.py has the same in NumPy.

#pragma once

// The factors of a step of AdamW. moment_step = 1 - beta1, or -beta1 if beta1 is below 1/2: a moment moves from
// the end that is nearer. rate = lr / (1 - beta1^step), root = 1 / sqrt(1 - beta2^step), decay = lr * weight_decay.
template <typename N> struct AdamwNumbers {
    N scale, moment_step, variance_kept, variance_share, rate, root, eps, decay;
};

template <typename N> struct Adamw {
    AdamwNumbers<N> by;
    bool decays, from_grad;
    INLINE explicit Adamw(const AdamwNumbers<double>& x)
        : by{as_number<N>(x.scale), as_number<N>(x.moment_step), as_number<N>(x.variance_kept),
             as_number<N>(x.variance_share), as_number<N>(x.rate), as_number<N>(x.root),
             as_number<N>(x.eps), as_number<N>(x.decay)},
          decays(!is_zero(by.decay)), from_grad(!is_positive(by.moment_step)) {}
    template <typename V> INLINE void step(V& param, V grad, V& moment, V& variance) const {
        const V g = grad * by.scale;
        const V moved = (g - moment) * by.moment_step;
        moment = from_grad ? g + moved : moment + moved;
        variance = variance * by.variance_kept + g * g * by.variance_share;
        const V change = moment / (root_of(variance) * by.root + by.eps) * by.rate;
        param = param - (decays ? change + param * by.decay : change);
    }
};

template <typename N> struct Sgd {
    N lr, scale, factor, decay;
    bool decays, nesterov;
    INLINE Sgd(double lr, double scale, double momentum, double decay, bool nesterov)
        : lr(as_number<N>(lr)), scale(as_number<N>(scale)), factor(as_number<N>(momentum)),
          decay(as_number<N>(decay)), decays(!is_zero(as_number<N>(decay))), nesterov(nesterov) {}
    template <typename V> INLINE V change_of(V param, V grad) const {
        return decays ? grad * scale + param * decay : grad * scale;
    }
    template <typename V> INLINE void step(V& param, V grad) const { param = param - change_of(param, grad) * lr; }
    template <typename V> INLINE void step(V& param, V grad, V& momentum) const {
        const V change = change_of(param, grad);
        momentum = momentum * factor + change;
        param = param - (nesterov ? change + momentum * factor : momentum) * lr;
    }
};
