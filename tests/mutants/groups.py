"""Faults in norms over ranks with a device each: (file, old text, new text, what)."""

TESTS = ("tests/test_rank_states.py", "tests/test_device_groups.py", "tests/test_capture.py")

KERNEL = "kernels/norm_of_ranks.cu"
_NORM = "gradkit/_open/device_meeting.py"
_RANKS = "gradkit/_ranks/device.py"
_NCCL = "gradkit/_ranks/nccl.py"
_LAUNCHER = "gradkit/_cuda/clipping.py"
_LISTS = "gradkit/_cuda/launch/list_norms.py"
_NUMPY = "gradkit/_numpy/clipping.py"
ON_DEVICES = (_NORM, _RANKS, _NCCL)  # whose faults show on an emulated device

MUTANTS = (
    (KERNEL, "    state[STATUS] = 0;\n", "", "a status that nobody writes"),
    (KERNEL, "state[SCALE] = fabs(number_of(scale, number));", "state[SCALE] = number_of(scale, number);", "a negative scale"),
    (KERNEL, "state[STATUS] != 0 ? 1 : ", "", "a rank that failed taken for one that did not"),
    (KERNEL, "state[STATUS] != 0 ? 1", "state[STATUS] > 0 ? 1", "a status that is NaN taken for 0"),
    (KERNEL, "state[DIGEST] != digest ? 2 : 0", "0", "different calls joined"),
    (KERNEL, "agree = agree && fault == 0;", "agree = fault == 0;", "the last rank's fault alone"),
    (KERNEL, "fault != 0 && faults[r] == 0", "fault != 0", "a fault forgotten for a later one"),
    (KERNEL, "        if (fault != 0 && faults[r] == 0) faults[r] = fault;\n", "", "faults that nobody can check"),
    (KERNEL, "    double by = 0;\n", "    double by = 1;\n", "small scales lost beside 1"),
    (KERNEL, "finite = finite && fabs(own.hi) <= LARGEST;", "finite = fabs(own.hi) <= LARGEST;", "the last rank's elements alone"),
    (KERNEL, "        if (state[SCALE] != by) ORDER::shrink(own, state[SCALE] / by, p);\n", "", "one scale for all ranks"),
    (KERNEL, "        factors[0] = 0;\n", "        factors[0] = 1e300;\n", "a clip though a rank failed"),
    (KERNEL, "        factors[1] = 1;\n", "        factors[1] = number_of(scale, number);\n", "gradients scaled though a rank failed"),
    (KERNEL, "factors[2] = __longlong_as_double(0x7ff0000000000000);", "factors[2] = number_of(max_norm, limit);", "a limit obeyed though a rank failed"),
    (KERNEL, "if (fresh) write_norm", "write_norm", "a caller's array written though a rank failed"),
    (KERNEL, "        if (fresh) write_norm(out, __longlong_as_double(0x7ff8000000000000));\n", "", "a new norm of any bits"),
    (KERNEL, "    write_norm(out, factors[0]);\n", "", "no norm for the caller"),
    (KERNEL, "    factors[2] = number_of(max_norm, limit);\n", "    factors[2] = limit;\n", "a limit on the device not read"),
    (KERNEL, "    factors[1] = number_of(scale, number);\n", "    factors[1] = fabs(number_of(scale, number));\n", "a negative scale clipped as a positive one"),
    (_LAUNCHER, "        rows = contiguous(self.device, states)\n", "        rows = states\n", "rows with gaps taken for contiguous ones"),
    (_LAUNCHER, "out[3:].reshape(1, PART), copies=copies)", "out[3:].reshape(1, PART), copies=None)", "replicas counted as often as they are"),
    (_LISTS, "    if not device.capturing():\n        return device.xp.asarray", "    if True:\n        return device.xp.asarray", "replicas uploaded while a graph is captured"),
    (_NORM, "        found_inf,\n        scale=", "        None,\n        scale=", "found_inf not written"),
    (_NORM, "    if held.arrays and not same_device", "    if False and not same_device", "gradients on another device"),
    (_NORM, "digest = digest_of(sums.call, ROOM)", "digest = 0.0", "all calls alike"),
    (_NORM, "return Factors(norm, limit, scaled)", "return Factors(own.norm, limit, scaled)", "a clip by the caller's norm though a rank failed"),
    (_NORM, "return Factors(norm, limit, scaled)", "return Factors(norm, own.limit, scaled)", "a clip to the caller's limit though a rank failed"),
    (_NORM, "return Factors(norm, limit, scaled)", "return Factors(norm, limit, own.scale)", "a clip by the caller's scale though a rank failed"),
    (_RANKS, "                noted.fill(0)\n", "                pass\n", "a fault that is raised for ever"),
    (_RANKS, "            backend.device.synchronize()  # calls may", "            pass  # calls may", "a check that does not wait"),
    (_RANKS, "        zeros.fill(0)\n", "", "faults of any bits"),
    (_RANKS, "            self._gather(own, rows)\n        return rows", "            self._gather(own, rows)\n        return rows[::-1]", "rows in another order"),
    (_RANKS, "            self._gather(own, rows)\n        return rows", "            self._gather(own, rows)\n        return np.nan_to_num(rows)", "NaN lost"),
    (_NCCL, "_NCCL_FLOAT64 = 8", "_NCCL_FLOAT64 = 7", "numbers sent as float32"),
    (_NCCL, "source, target, state.size, _NCCL", "source, target, rows.size, _NCCL", "the count of all ranks' numbers"),
    (_NCCL, "allgather(state, rows, stream=stream)", "allgather(state, rows)", "a collective on the default stream"),
    (_NCCL, "all_gather(state, rows, state.size)", "all_gather(state, rows, rows.size)", "the count of all ranks' numbers, by cupyx"),
)  # fmt: skip
