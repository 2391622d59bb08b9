"""Faults in calls on several devices of one process: (file, old text, new text, what)."""

TESTS = ("tests/test_several_devices.py", "tests/test_cupy_device.py")

_DEVICES = "gradkit/_cuda/several_devices.py"
SHARES = "gradkit/_open/several_devices.py"
_DEVICE = "gradkit/_cuda/launch/device.py"

MUTANTS = (
    (_DEVICES, "        device.wait(written)\n", "", "a copy of what may not be written yet"),
    (_DEVICES, "    with origin.active():\n        origin.wait(read)\n", "", "memory used again that may still be read"),
    (_DEVICES, "    with device.active():\n        device.wait(written)", "    with origin.active():\n        device.wait(written)", "a copy queued on another device"),
    (_DEVICES, "    with origin.active():\n        written = origin.record()", "    with device.active():\n        written = origin.record()", "an event of another device's stream"),
    (_DEVICES, "device.fetch(source, origin.number, target)", "device.fetch(source, device.number, target)", "a copy from the wrong device"),
    (_DEVICES, "        if backend.device is self.device or not arrays:\n            return numbers\n", "        return numbers\n", "numbers read on another device"),
    (_DEVICES, "self._numbers([norm, max_norm, scale], backend)", "[norm, *self._numbers([max_norm, scale], backend)]", "a norm read on another device"),
    (_DEVICES, "        [factor] = self._numbers([coefficient], backend)\n", "        factor = coefficient\n", "a coefficient read on another device"),
    (_DEVICES, "                [by] = self._numbers([scale], backend)\n", "                by = scale\n", "a scale read on another device"),
    (_DEVICES, "scale, out, found_inf)()", "scale, out, None)()", "found_inf not written over devices"),
    (_DEVICES, "scale, out, found_inf)()", "1.0, out, found_inf)()", "a scale forgotten over devices"),
    (_DEVICES, "parts, len(parts), scale", "parts, len(parts) - 1, scale", "the last device's gradients lost"),
    (_DEVICES, "        elif not any(plan.chunks for plan in self._plans(grads)):", "        elif False:", "NaN out of a scale and no elements"),
    (_DEVICES, "        elif not any(plan.chunks", "        elif not all(plan.chunks", "a device without elements that silences the others"),
    (_DEVICES, "            if found_inf is not None:\n                found_inf.fill(0)\n", "", "found_inf of no elements left as it was"),
    (_DEVICES, "room[self.device.xp.asarray(places)]", "room", "norms in the order of devices"),
    (_DEVICES, "places = np.argsort(order)", "places = np.array(order)", "norms at each other's places"),
    (_DEVICES, "row, counts = parts[k : k + 1], copies and own.of(copies)", "row, counts = parts[k : k + 1], copies and copies[: len(own.positions)]", "replicas of other gradients"),
    (_DEVICES, "                counts = copies and own.of(copies)\n", "                counts = None\n", "replicas that count as often as they are, each tensor by itself"),
    (_DEVICES, "                if backend.device.capturing():", "                if False:", "a captured call that is not refused"),
    (_DEVICES, "        for backend in self.backends:\n            with backend.device.active():\n                if", "        for backend in self.backends[:1]:\n            with backend.device.active():\n                if", "a capture on the first device alone refused"),
    (_DEVICES, "            with backend.device.active():\n                made.append((backend.device, steps(backend, own.views, targets)))", "            if backend:\n                made.append((backend.device, steps(backend, own.views, targets)))", "launches made while another device is current"),
    (_DEVICES, "            with device.active():\n                launch(own_steps)", "            if device:\n                launch(own_steps)", "launches on another device"),
    (_DEVICES, "made.append((backend.device, steps(backend, own.views, targets)))", "made.append((backend.device, steps(backend, own.views, targets)))\n                launch(made.pop()[1])", "a device written before all can be"),
    (SHARES, "        for share in reversed(shares):", "        for share in shares:", "the last device current"),
    (SHARES, "        backend.refuse_capture()\n", "", "a capture found out by nobody"),
    (SHARES, "every |= zip(share.own.positions, items, strict=True)", "every |= zip(range(len(every), len(every) + len(items)), items, strict=True)", "results in the order of devices"),
    (SHARES, "label = tuple(pick(labels))", "label = tuple(labels[: len(pick(labels))])", "an error that names another result"),
    (_DEVICE, "ends = target.data.ptr, self.number, source.data.ptr, origin", "ends = source.data.ptr, origin, target.data.ptr, self.number", "a copy the other way round"),
    (_DEVICE, "copy(*ends, source.nbytes, self.cuda_stream())", "copy(*ends, source.nbytes, 0)", "a copy on the default stream"),
)  # fmt: skip
