"""Faults in the kernels by rule: patterns of CUDA C++, each place by itself."""

import re
from collections.abc import Callable, Iterator

from tests.mutants.mutant import Place

# Loops over registers, whose number the compiler knows and holds the index against.
_CONSTANT = r"(?:(?:VEC|OWN|N|B|CHUNKS|PLANES|AT_ONCE|PACKS|[\w<>, ]+::[A-Z]+|8)\b|sizeof|2;)"
_SUM = (
    r"((?:\*own|own\.sum\([^)]*\)|(?:own\.)?\b(?:sums|part|totals?))(?:\.\w+|\[[^\]]+\])*) "
    r"(?:\+= ([^;\n]+)|= (fused\([^;\n]+\)));"
)
_IN_DOUBLE = re.compile(r"\*own|exactly|deviation|fused\(count|sums\[2 ")
_WORD = r"[\w.:>\[\]-]*\w\]?"  # a variable, a member or an element
_CALL = r"(?!(?:if|for|while|return|switch|sizeof|static_assert|asm)\b)\w[\w.:>-]*(?:<[^;<>()]*>)?"
_SILENT = re.compile(r"\s*(#|typedef|template|static_assert|//|extern|__global__)")
_AXES = {"x": "y", "y": "x"}


def _in_data_dtype(found: re.Match[str]) -> str:
    """A sum that is rounded to the data's dtype each time."""
    target, added, total = found.groups()
    widen = "to_double" if _IN_DOUBLE.search(found[0]) else "widen"
    return f"{target} = {widen}(narrow<DATA_T>({total or f'{target} + {added}'}));"


def _other_axis(found: re.Match[str]) -> str:
    return f"{found[1]}.{_AXES[found[2]]}"


# Each rule: what a match of the pattern becomes.
RULES: tuple[tuple[str, str, str | Callable[[re.Match[str]], str]], ...] = (
    ("no barrier", r"__sync(?:threads|warp)\(\w*\);", ";"),
    ("a barrier in a divergent branch", r"__syncthreads\(\);", "if (threadIdx.x == 0) __syncthreads();"),
    ("a wrong mask", r"\bALL_LANES\b(?=[,)])", "0xffffu"),
    ("a boundary off by one", rf"(?<=[\w)\]]) < (?!{_CONSTANT})(?=[\w(])", " <= "),
    ("a boundary off by one", r"(?<=[\w)\]]) >= (?=[\w(])", " > "),
    ("a boundary off by one", r"(?<=[\w)\]]) <= (?=[\w(])", " < "),
    ("a boundary off by one", r"(?<=[\w)\]]) > (?=[\w(])", " >= "),
    ("an index of 32 bits", r"\bi64\b(?!>)", "int"),
    ("an unsigned index of 32 bits", r"\bstart_of\([^()\n]*\)", r"static_cast<u32>(\g<0>)"),
    ("an unsigned index of 32 bits", r"(?<= \+ )(?:\w[\w.]* \* )+width(?=[ ;,)])", r"static_cast<u32>(\g<0>)"),
    ("the tail lost", rf"(for \([^;\n]*; [^;\n]*?)(\w+) < (?!{_CONSTANT})", r"\1\2 + 1 < "),
    ("the tail lost", r"/= 2(?=\))", "/= 4"),
    ("a wrong stride", r"((?:;|,) \w+ \+= )([^,;()\n]+)(?=[,)])", r"\1 2 * (\2)"),
    ("another dimension", r"\b(threadIdx|blockIdx|blockDim|gridDim)\.([xy])\b", _other_axis),
    ("floor for ceil", r"\(([\w.]+) \+ ([\w.]+) - 1\) / \2\b", r"\1 / \2"),
    ("a sum in the data's dtype", _SUM, _in_data_dtype),
    ("float32 for float64", r"\bdouble\b(?= \w+ [=;,])", "float"),
    ("a maximum that drops NaN", r" \|\| (\w+) != \1\b", ""),
    ("a maximum that drops NaN", r"\b(\w+) > (\w+) \? \1 : \2\b", r"fmax(\1, \2)"),
    ("no scaling", r"(?<![\w.])0x1p-?\d+f?", "1"),
    ("1/N missing", rf" / (?!\*){_WORD}", ""),
    ("1/N missing", r"(?<=\n)( +)[^\n=;]+ /= [^;\n]+;", r"\1;"),
    ("= for +=", r"(?<=[\w\])]) \+= (?=[^;\n]*;\n)", " = "),
    ("= for +=", rf"({_WORD}) = fused\(([^;\n]+), \1\);", r"\1 = fused(\2, 0 * \1);"),
    ("+= for =", r"(?<=\n)( +(?!const|return)\w+\[[^=;\n]*\]) = ", r"\1 += "),
    ("eps ignored", r" \+ eps\b", ""),
    ("eps ignored", r"\((\w+) < (eps) \? \2 : \1\)", r"\1"),
    ("shared memory one element short", r"(__shared__ [^\[\n]+\[)([^\]]+)\]", r"\1(\2) - 1]"),
    ("a statement dropped", rf"(?<=\n)( +){_CALL}\([^;\n]*\);", r"\1;"),
    ("an output element not written", r"(?<=\n)( +)(?!for|if|const|return)(?:\*?\w[\w.]*\[[^=;\n]*\]|\*\w+) = [^;\n]+;", r"\1;"),
    ("a guard dropped", r"(?<=\n)( +)if \([^\n{]*\) (?:return|continue|break)[^;\n]*;", r"\1;"),
    ("a condition dropped", r"(?<=\n)( +)if \([^\n{]*?\) (?!return|continue|break)(?=[\w_]+[^\n]*;\n)", r"\1"),
    ("any for all", r"\b__any_sync\(", "__all_sync("),
    ("a condition turned round", r"(?<=\n)( +if \()([^\n{]+)(?=\) \{\n)", r"\1!(\2)"),
    ("a condition turned round", r"(?<=[\w)\]]) != (?=[\w(])", " == "),
    ("and for or", r" \|\| ", " && "),
    ("and for or", r" && ", " || "),
    ("neighbours swapped", rf"(?<=[\w>])(\((?:[^()\n;]*, )?)(?!const\b)({_WORD}), ({_WORD})(?=[,)])", r"\1\3, \2"),
    ("branches swapped", rf" \? ({_WORD}|\w+\([^()]*\)) : ({_WORD}|\w+\([^()]*\))", r" ? \2 : \1"),
    ("another operator", r"(?<=[\w)\]]) \+ (?=[\w(])", " - "),
    ("another operator", r"(?<=[\w)\]]) - (?=[\w(])", " + "),
    ("compiled: another rounding", r'(?<=")(\w+)\.rn\.', r"\1.rz."),
    ("compiled: subnormals flushed", r'(?<=")((?:add|sub|mul|div|fma)\.rn|abs|cvt(?=\.f64\.f32))(?=\.f)', r"\1.ftz"),
)  # fmt: skip


def places(text: str) -> Iterator[Place]:
    """Every place of a kernel's file where a rule applies, but comments and preprocessor lines."""
    for rule, pattern, replacement in RULES:
        if rule == "a sum in the data's dtype" and "DATA_T" not in text:
            continue
        for found in re.finditer(pattern, text):
            first = text.rfind("\n", 0, found.end() - 1) + 1
            before = text[first : found.start()] or text[first : found.end()]
            line = text[first : text.find("\n", found.end() - 1)]
            if "//" in before or _SILENT.match(line):
                continue
            new = replacement(found) if callable(replacement) else found.expand(replacement)
            yield Place(rule, *found.span(), new)
