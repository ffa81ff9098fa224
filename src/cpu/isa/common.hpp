// SPDX-License-Identifier: Apache-2.0
// What an instruction set is to the CPU backend: a struct `Isa` of types, constants and
// always-inlined functions. The algorithm is written once, as templates over it; isa/NAME.cpp
// instantiates them with the flags of that set.
//
// Every Isa struct lives in an anonymous namespace, so whatever is instantiated over it has
// internal linkage: no code compiled for a newer set can be picked by the linker for use elsewhere.
// Nothing in these translation units may need an out-of-line copy of a shared inline function; they
// are always optimised, and a test looks for weak symbols in their objects.
//
// The 32-bit unit. All matrix operands are counted in units along the reduction: a float (kPair =
// 1), or two bf16 (kPair = 2) that one dot-product instruction multiplies and adds. So one source
// serves both.
//
// | member | meaning |
// |---|---|
// | Vec, Mask | kLanes floats, kLanes booleans |
// | Unit, UnitVec | a unit in memory, kLanes units in a register |
// | kRows, kVecs | the register tile: kRows x (kVecs * kLanes) accumulators |
// | zero() set1(x) load(p) store(p, v) | loads and stores need no alignment |
// | add sub mul div fma(a, b, c) | fma = a * b + c |
// | abs(a) copy_sign(magnitude, sign) | |
// | max(a, b) | b where either is NaN |
// | min_zero(x) | min(x, 0); NaN stays NaN |
// | fraction(x, n) | x - n for n = round(x), 0 for x = +-inf |
// | round(x) scale(p, n) | nearest even integer; p * 2^n, 0 far below the range |
// | lane_mask(begin, end) | lanes l with begin <= l < end; any integers |
// | not_equal(a, b) less(a, b) both(m, n) | masks: a != b (true where one is NaN); a < b; m and n |
// | keep(m, x) select(m, a, b) | m ? x : 0; m ? a : b |
// | any_nan(x) reduce_add(x) | over the lanes, the sum in a fixed order |
// | load_as<DType>(p) store_as<DType>(p, v) | kLanes elements, converted, to nearest even |
// | load_units store_units broadcast(u) | |
// | multiply_add(acc, a, b) | acc + a * b, or acc + a.lo * b.lo + a.hi * b.hi |
// | transpose(src, lds, dst, ldd) | kLanes x kLanes units |
//
// and with kPair = 2
//
// | load_bytes(p) | 2 * kLanes bf16 of any alignment |
// | any_not_finite(v) | whether one of them is an infinity or NaN |
// | narrow(lo, hi) | 2 * kLanes floats to bf16, in order |
// | interleave(a, b, lo, hi) | lo, hi = (a_0, b_0), (a_1, b_1), ... of 2 * kLanes bf16 each |
#pragma once

#define FG_INLINE [[gnu::always_inline]] static inline

#if defined(__clang__)
#define FG_UNROLL _Pragma("unroll")
#else
#define FG_UNROLL _Pragma("GCC unroll 16")
#endif
