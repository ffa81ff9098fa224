// SPDX-License-Identifier: Apache-2.0
// Implements backward_case.hpp.
#include <cmath>
#include <functional>
#include <utility>

#include "backward_case.hpp"

namespace flashgrad {

Problem problem(DType dtype, std::int64_t batch, std::int64_t sq, std::int64_t skv, std::int64_t hq,
                std::int64_t hkv, std::int64_t d, std::int64_t dv) {
  Problem p;
  p.dtype = p.dq_dtype = p.dk_dtype = p.dv_dtype = dtype;
  p.device_type = DeviceType::kCuda;
  p.batch = batch;
  p.seqlen_q = p.max_seqlen_q = sq;
  p.seqlen_kv = p.max_seqlen_kv = skv;
  p.heads_q = hq;
  p.heads_kv = hkv;
  p.head_dim = d;
  p.head_dim_v = dv;
  p.has_dout = p.wants_dq = p.wants_dk = p.wants_dv = true;
  p.scale = 1 / std::sqrt(static_cast<double>(d));
  return p;
}

namespace {

const BandMask kCausalTop{kUnbounded, 0, Alignment::kTopLeft};

}  // namespace

std::vector<Case> cases() {
  std::vector<Case> list;
  const auto add = [&list](const char* name, Problem p, const BandMask& mask,
                           const std::function<void(Case&)>& change = {}) {
    Case c{};
    c.name = name;
    c.p = p;
    c.p.mask = mask;
    if (change) {
      change(c);
    }
    list.push_back(std::move(c));
  };
  constexpr DType kB = DType::kBF16;
  constexpr DType kH = DType::kF16;
  struct Width {
    int d, dv;
    const char* full;
    const char* causal;
  };
  for (const Width& width : {Width{128, 128, "d128 full 512", "d128 causal 1024"},
                             Width{64, 64, "d64 full 512", "d64 causal 1024"},
                             Width{96, 96, "d96 full 512", "d96 causal 1024"},
                             Width{256, 256, "d256 full 512", "d256 causal 1024"},
                             Width{192, 192, "d192 full 512", "d192 causal 1024"},
                             Width{192, 128, "d192/128 full 512", "d192/128 causal 1024"}}) {
    const int d = width.d;
    const int dv = width.dv;
    for (const DType t : {kB, kH}) {
      add(width.full, problem(t, 1, 512, 512, 2, 2, d, dv), kFull);
      add(width.causal, problem(t, 2, 1024, 1024, 2, 2, d, dv), kCausal);
    }
    add("full tails 300x451", problem(kB, 2, 300, 451, 3, 3, d, dv), kFull);
    add("causal tails 451x300", problem(kB, 2, 451, 300, 2, 2, d, dv), kCausal);
    add("causal tails 300x451", problem(kB, 2, 300, 451, 2, 2, d, dv), kCausal);
    add("causal top-left 300x451", problem(kB, 1, 300, 451, 2, 2, d, dv), kCausalTop);
    add("1x1", problem(kB, 2, 1, 1, 2, 2, d, dv), kFull);
    add("3x799", problem(kB, 2, 3, 799, 2, 2, d, dv), kCausal);
    add("799x3", problem(kB, 2, 799, 3, 2, 2, d, dv), kCausal);
    add("window (100, 50)", problem(kB, 1, 1024, 1024, 2, 2, d, dv),
        BandMask{100, 50, Alignment::kBottomRight});
    add("band (-128, 864)", problem(kB, 1, 700, 1100, 2, 2, d, dv),
        BandMask{-128, 864, Alignment::kTopLeft});
    add("empty band", problem(kB, 1, 200, 200, 2, 2, d, dv),
        BandMask{-1, -1, Alignment::kBottomRight});
    add("gqa 8/2 causal", problem(kB, 2, 500, 500, 8, 2, d, dv), kCausal);
    add("mqa 6/1 full", problem(kB, 1, 333, 257, 6, 1, d, dv), kFull);
    add("f32 gradients", problem(kB, 1, 300, 300, 4, 2, d, dv), kCausal,
        [](Case& c) { c.p.dq_dtype = c.p.dk_dtype = c.p.dv_dtype = DType::kF32; });
    add("dlse", problem(kB, 1, 300, 300, 4, 2, d, dv), kCausal,
        [](Case& c) { c.p.has_dlse = true; });
    add("dlse without dout", problem(kB, 1, 300, 300, 4, 2, d, dv), kCausal, [](Case& c) {
      c.p.has_dlse = true;
      c.p.has_dout = false;
      c.p.wants_dv = false;
    });
    add("sinks", problem(kB, 2, 300, 200, 4, 2, d, dv), kCausal,
        [](Case& c) { c.p.has_sinks = c.p.wants_dsinks = c.p.has_dlse = true; });
    add("softcap 15", problem(kB, 1, 300, 300, 4, 2, d, dv), kCausal,
        [](Case& c) { c.p.softcap = 15; });
    add("negative scale", problem(kB, 1, 300, 300, 2, 2, d, dv), kCausal,
        [](Case& c) { c.p.scale = -0.1; });
    add("plus inf lse", problem(kB, 1, 451, 300, 2, 2, d, dv), kCausal,
        [](Case& c) { c.plus_inf = true; });
    add("strides", problem(kB, 2, 301, 200, 3, 3, d, dv), kCausal, [](Case& c) {
      c.head_pad = 8;
      c.row_pad = 64;
    });
    add("odd addresses", problem(kB, 2, 301, 200, 4, 2, d, dv), kCausal,
        [](Case& c) { c.first = 1; });
    add("odd addresses, packed, deterministic", problem(kB, 0, 0, 0, 4, 2, d, dv), kCausal,
        [](Case& c) {
          c.p.deterministic = true;
          c.lens_q = {0, 100, 64, 1, 300, 0, 513, 0};
          c.lens_kv = {3, 100, 128, 77, 200, 0, 600, 0};
          c.first = 3;
        });
    add("odd strides", problem(kB, 2, 301, 200, 4, 2, d, dv), kCausal, [](Case& c) {
      c.head_pad = 3;
      c.row_pad = 5;
    });
    add("odd strides, stride-0 dout", problem(kH, 2, 301, 200, 4, 2, d, dv), kFull, [](Case& c) {
      c.head_pad = 1;
      c.stride0 = true;
    });
    add("odd widths", problem(kB, 2, 301, 200, 4, 1, d - 1, dv - 1), kCausal);
    add("odd widths, aligned rows", problem(kB, 2, 301, 200, 4, 2, d - 3, dv - 3), kCausal,
        [](Case& c) { c.head_pad = 3; });
    add("odd widths packed sinks f32", problem(kB, 0, 0, 0, 4, 2, d - 5, dv - 3), kCausal,
        [](Case& c) {
          c.p.dq_dtype = c.p.dk_dtype = c.p.dv_dtype = DType::kF32;
          c.p.has_sinks = c.p.wants_dsinks = c.p.has_dlse = true;
          c.lens_q = {0, 100, 64, 1, 300, 0, 513, 0};
          c.lens_kv = {3, 100, 128, 77, 200, 0, 600, 0};
          c.seqused_q = {0, 99, 64, 0, 200, 0, 400, 0};
          c.seqused_kv = {1, 50, 128, 7, 190, 0, 555, 0};
        });
    add("deterministic odd widths", problem(kH, 2, 300, 400, 4, 2, d - 4, dv - 1), kCausal,
        [](Case& c) {
          c.p.deterministic = true;
          c.head_pad = 2;
        });
    add("stride-0 dout", problem(kB, 1, 300, 300, 4, 2, d, dv), kCausal,
        [](Case& c) { c.stride0 = true; });
    add("packed causal", problem(kB, 0, 0, 0, 4, 2, d, dv), kCausal, [](Case& c) {
      c.lens_q = {0, 100, 64, 1, 300, 0, 513, 0};
      c.lens_kv = {3, 100, 128, 77, 200, 0, 600, 0};
    });
    add("packed seqused window", problem(kB, 0, 0, 0, 4, 2, d, dv),
        BandMask{60, 20, Alignment::kBottomRight}, [](Case& c) {
          c.lens_q = {100, 64, 1, 300, 20, 513, 30};
          c.lens_kv = {100, 128, 77, 200, 50, 600, 2};
          c.seqused_q = {99, 64, 0, 200, 20, 400, 30};
          c.seqused_kv = {50, 128, 7, 190, 0, 555, 2};
        });
    add("deterministic", problem(kB, 2, 600, 700, 4, 2, d, dv), kCausal,
        [](Case& c) { c.p.deterministic = true; });
    add("deterministic packed", problem(kB, 0, 0, 0, 4, 2, d, dv),
        BandMask{200, 20, Alignment::kBottomRight}, [](Case& c) {
          c.p.deterministic = true;
          c.lens_q = {0, 100, 64, 1, 300, 0, 513, 0};
          c.lens_kv = {3, 100, 128, 77, 200, 0, 600, 0};
        });
    add("deterministic softcap", problem(kH, 1, 300, 300, 4, 2, d, dv), kCausal, [](Case& c) {
      c.p.deterministic = true;
      c.p.softcap = 15;
      c.head_pad = 1;
    });
    add("no dq", problem(kB, 1, 300, 300, 4, 2, d, dv), kCausal,
        [](Case& c) { c.p.wants_dq = false; });
    add("only dq", problem(kB, 1, 300, 300, 4, 2, d, dv), kCausal,
        [](Case& c) { c.p.wants_dk = c.p.wants_dv = false; });
    add("seqused, q_offset", problem(kB, 3, 200, 300, 2, 2, d, dv), kCausal, [](Case& c) {
      c.seqused_q = {200, 100, 0};
      c.seqused_kv = {250, 300, 20};
      c.q_offset = {30, 200, 0};
    });
  }
  for (const int d : {64, 96, 128}) {
    // More sequences than threads that sort them.
    const auto many = [](Case& c) {
      for (int i = 0; i < 700; ++i) {
        c.lens_q.push_back(i % 3);
        c.lens_kv.push_back((i + 1) % 3);
      }
      c.lens_q[333] = c.lens_kv[333] = 300;
    };
    add("packed, 700 sequences", problem(kB, 0, 0, 0, 4, 2, d, d), kCausal, many);
    add("deterministic packed, 700 sequences", problem(kB, 0, 0, 0, 4, 2, d, d), kCausal,
        [=](Case& c) {
          c.p.deterministic = true;
          many(c);
        });
    add("deterministic packed full", problem(kH, 0, 0, 0, 3, 3, d, d), kFull, [](Case& c) {
      c.p.deterministic = true;
      c.lens_q = {700, 0, 2000, 100};
      c.lens_kv = {300, 200, 1500, 0};
    });
    // Marks of unreadable rows for 32 steps and more, through the heads inside of the blocks.
    add("deterministic gqa 6/2, empty rows", problem(kB, 1, 1451, 1300, 6, 2, d, d), kCausal,
        [](Case& c) {
          c.p.deterministic = true;
          c.plus_inf = true;
        });
  }
  // Enough units for the main kernel to serve them (unit_pipeline.hpp).
  for (const int d : {128, 96, 64}) {
    add("ring full 200x300", problem(kB, 40, 200, 300, 6, 6, d, d), kFull);
    add("ring causal gqa", problem(kH, 120, 300, 260, 8, 4, d, d), kCausal);
    add("ring idle tiles", problem(kB, 60, 100, 600, 4, 4, d, d), kCausalTop);
    add("ring odd strides", problem(kB, 100, 130, 200, 4, 4, d, d), kCausal,
        [](Case& c) { c.head_pad = 3; });
    add("ring odd widths", problem(kB, 100, 130, 200, 4, 4, d - 1, d - 1), kCausal);
    add("many units f32 odd strides", problem(kB, 100, 130, 200, 4, 4, d - 3, d), kCausal,
        [](Case& c) {
          c.p.dq_dtype = DType::kF32;
          c.head_pad = 3;
        });
    add("many units narrow", problem(kB, 100, 130, 200, 4, 4, d - 8, d), kCausal);
    add("ring seqused sinks", problem(kB, 50, 200, 300, 8, 4, d, d),
        BandMask{60, 20, Alignment::kBottomRight}, [](Case& c) {
          c.p.has_sinks = c.p.wants_dsinks = true;
          for (int i = 0; i < 50; ++i) {
            c.seqused_q.push_back(i * 37 % 201);
            c.seqused_kv.push_back(300 - i * 5);
          }
        });
  }
  // Key heads in parts (bwd_plan.hpp), whose dk and dv are summed.
  for (const int d : {128, 96, 64}) {
    add("parts of 8/1", problem(kB, 1, 700, 700, 8, 1, d, d), kCausal);
    add("parts of 6/2, odd strides", problem(kH, 2, 300, 451, 6, 2, d, d), kFull,
        [](Case& c) { c.head_pad = 3; });
    add("parts of 9/1, narrow, f32", problem(kB, 1, 451, 300, 9, 1, d - 3, d - 8), kCausal,
        [](Case& c) { c.p.dk_dtype = c.p.dv_dtype = DType::kF32; });
    add("parts, f32, no dv", problem(kB, 1, 300, 300, 4, 1, d, d), kCausal, [](Case& c) {
      c.p.dk_dtype = DType::kF32;
      c.p.wants_dv = false;
    });
    add("parts, no dk", problem(kB, 1, 300, 300, 4, 1, d, d), kCausal,
        [](Case& c) { c.p.wants_dk = false; });
    add("parts, softcap, window", problem(kB, 2, 600, 600, 6, 1, d, d),
        BandMask{100, 20, Alignment::kBottomRight}, [](Case& c) { c.p.softcap = 15; });
    add("parts, empty rows", problem(kB, 1, 851, 600, 8, 2, d, d), kCausal,
        [](Case& c) { c.plus_inf = true; });
    add("parts, seqused, q_offset", problem(kB, 3, 200, 500, 8, 1, d, d), kCausal, [](Case& c) {
      c.seqused_q = {200, 100, 0};
      c.seqused_kv = {250, 500, 20};
      c.q_offset = {30, 200, 0};
    });
    for (const bool deterministic : {false, true}) {
      const auto lengths = [deterministic](Case& c) {
        c.p.deterministic = deterministic;
        c.lens_q = {0, 100, 64, 1, 300, 0, 513, 0};
        c.lens_kv = {3, 100, 128, 77, 200, 0, 600, 0};
      };
      add(deterministic ? "deterministic parts, packed" : "parts, packed",
          problem(kB, 0, 0, 0, 8, 1, d, d), kCausal, lengths);
    }
    add("deterministic parts of 12/1", problem(kB, 1, 1100, 1100, 12, 1, d, d), kCausal,
        [](Case& c) { c.p.deterministic = true; });
    add("deterministic parts of 8/2, full", problem(kH, 2, 600, 700, 8, 2, d, d), kFull,
        [](Case& c) { c.p.deterministic = true; });
    add("ring of parts", problem(kB, 40, 200, 300, 8, 1, d, d), kCausal);
  }
  // All keys of a sequence in one tile, or in a cluster: the main kernel writes dq.
  struct Whole {
    int d, keys;
  };
  for (const Whole& whole : {Whole{64, 250}, Whole{96, 126}, Whole{128, 120}, Whole{128, 250}}) {
    const int d = whole.d;
    const int keys = whole.keys;
    add("whole full", problem(kB, 3, 300, keys, 3, 3, d, d), kFull);
    add("whole full f16", problem(kH, 2, 257, keys, 4, 2, d, d), kFull);
    add("whole causal", problem(kH, 2, keys + 60, keys, 2, 2, d, d), kCausal);
    add("whole causal top-left", problem(kB, 2, 400, keys, 4, 2, d, d), kCausalTop);
    add("whole causal gqa 8/2", problem(kB, 40, keys, keys, 8, 2, d, d), kCausal);
    add("whole, many rows", problem(kB, 2, 1500, keys, 6, 1, d, d), kFull);
    add("whole window", problem(kB, 2, 300, keys, 4, 2, d, d),
        BandMask{70, 20, Alignment::kTopLeft});
    add("whole empty band", problem(kB, 1, 300, keys, 2, 2, d, d),
        BandMask{-1, -1, Alignment::kBottomRight});
    add("whole one row", problem(kB, 3, 1, keys, 2, 2, d, d), kFull);
    add("whole narrow", problem(kB, 2, 300, keys, 4, 2, d - 16, d - 8), kCausal);
    add("whole odd widths", problem(kB, 2, 300, keys, 4, 2, d - 3, d - 5), kCausal);
    add("whole odd strides", problem(kB, 2, 300, keys, 4, 2, d, d), kCausal,
        [](Case& c) { c.head_pad = 3; });
    add("whole strides", problem(kB, 2, 300, keys, 4, 4, d, d), kCausal, [](Case& c) {
      c.head_pad = 8;
      c.row_pad = 64;
    });
    add("whole f32 dk, dv", problem(kB, 2, 300, keys, 4, 2, d, d), kCausal,
        [](Case& c) { c.p.dk_dtype = c.p.dv_dtype = DType::kF32; });
    add("whole keys, f32 dq", problem(kB, 2, 300, keys, 4, 2, d, d), kCausal,
        [](Case& c) { c.p.dq_dtype = DType::kF32; });
    add("whole sinks", problem(kB, 2, 300, keys, 4, 2, d, d), kCausal,
        [](Case& c) { c.p.has_sinks = c.p.wants_dsinks = c.p.has_dlse = true; });
    add("whole, no dk", problem(kB, 2, 300, keys, 4, 2, d, d), kCausal,
        [](Case& c) { c.p.wants_dk = false; });
    add("whole, no dv", problem(kB, 2, 300, keys, 4, 1, d, d), kCausal,
        [](Case& c) { c.p.wants_dv = false; });
    add("whole, deterministic, only dq", problem(kB, 2, 300, keys, 4, 2, d, d), kCausal,
        [](Case& c) {
          c.p.wants_dk = c.p.wants_dv = false;
          c.p.deterministic = true;
        });
    add("whole seqused, q_offset", problem(kB, 3, 300, keys, 4, 2, d, d), kCausal, [keys](Case& c) {
      c.seqused_q = {300, 100, 0};
      c.seqused_kv = {keys - 50, keys, 20};
      c.q_offset = {30, 200, 0};
    });
    for (const bool deterministic : {false, true}) {
      add(deterministic ? "whole, deterministic" : "whole, empty rows",
          problem(kB, 2, 451, keys, 6, 2, d, d), kCausal, [deterministic](Case& c) {
            c.p.deterministic = deterministic;
            c.plus_inf = true;
          });
      add(deterministic ? "whole packed, deterministic" : "whole packed",
          problem(kB, 0, 0, 0, 4, 2, d, d), kCausal, [=](Case& c) {
            c.p.deterministic = deterministic;
            c.max_seqlen = keys;
            c.lens_q = {0, 100, 64, 1, keys, 5, keys - 3, 20, 0};
            c.lens_kv = {3, 100, keys, 77, keys - 10, 0, keys - 1, 20, 0};
            c.seqused_q = {0, 99, 64, 1, keys, 5, keys - 40, 20, 0};
            c.seqused_kv = {1, 50, keys - 1, 77, keys - 20, 0, keys - 1, 20, 0};
          });
    }
  }
  add("d72", problem(kB, 2, 200, 200, 4, 4, 72, 72), kCausal);
  // The narrowest and the widest of the kernel for 96, and v alone wider than 64.
  add("d65", problem(kH, 2, 200, 300, 4, 2, 65, 65), kCausal);
  add("d95, dv 96", problem(kB, 2, 300, 200, 4, 4, 95, 96), kCausal);
  add("d16, dv 88 deterministic", problem(kB, 2, 300, 200, 4, 2, 16, 88), kFull,
      [](Case& c) { c.p.deterministic = true; });
  add("d97, dv 96", problem(kB, 2, 300, 200, 4, 2, 97, 96), kFull);
  add("d96, dv 40", problem(kB, 2, 200, 300, 4, 2, 96, 40), kCausal);
  add("d33", problem(kB, 2, 200, 200, 4, 4, 33, 33), kCausal);
  add("d1", problem(kB, 2, 130, 200, 4, 2, 1, 1), kCausal);
  add("d7, dv 3", problem(kH, 2, 130, 200, 4, 2, 7, 3), kFull);
  add("d1, dv 128", problem(kB, 2, 130, 200, 4, 4, 1, 128), kFull);
  add("big logits f16", problem(kH, 2, 300, 300, 2, 2, 64, 64), kCausal,
      [](Case& c) { c.logit_scale = 4; });
  add("d128 full 2048", problem(kB, 1, 2048, 2048, 4, 4, 128, 128), kFull);
  // Long enough for clusters.
  add("causal 8200x8301", problem(kB, 1, 8200, 8301, 2, 1, 128, 128), kCausal);
  add("left 3000, 8200x8301", problem(kB, 1, 8200, 8301, 1, 1, 128, 128),
      BandMask{3000, kUnbounded, Alignment::kBottomRight});
  add("causal 8301x8200", problem(kH, 1, 8301, 8200, 1, 1, 128, 128), kCausal);
  add("d203, dv 72", problem(kB, 1, 300, 300, 4, 2, 203, 72), kCausal);
  add("d192, dv 128", problem(kB, 2, 300, 300, 4, 2, 192, 128), kCausal);
  add("d192, dv 128 full", problem(kH, 1, 513, 640, 2, 2, 192, 128), kFull);
  add("d130, dv 100 softcap", problem(kB, 1, 300, 300, 4, 2, 130, 100), kCausal,
      [](Case& c) { c.p.softcap = 15; });
  // Passes over heads, and over keys.
  for (const auto& [d, dv] : {std::pair{256, 256}, std::pair{192, 192}, std::pair{192, 128}}) {
    add("rooms, heads", problem(kB, 2, 1100, 1100, 4, 4, d, dv), kCausal, [](Case& c) {
      c.rooms = {99, 97, 50};
    });
    // More tiles than multiprocessors, most of them keys that no query sees.
    add("dead keys 300x3000", problem(kB, 4, 300, 3000, 4, 4, d, dv), kCausalTop);
    add("rooms, keys full", problem(kB, 1, 300, 9400, 1, 1, d, dv), kFull, [](Case& c) {
      c.rooms = {99, 98, 50};
    });
    add("rooms, keys gqa", problem(kH, 1, 300, 9400, 2, 1, d, 128), kCausal, [](Case& c) {
      c.rooms = {99, 98};
    });
    add("rooms, keys band", problem(kB, 1, 700, 9400, 1, 1, d, dv),
        BandMask{5000, 1000, Alignment::kTopLeft}, [](Case& c) {
          c.rooms = {99, 98};
        });
    add("rooms, packed", problem(kB, 0, 0, 0, 2, 2, d, dv), kCausal, [](Case& c) {
      c.lens_q = {0, 100, 64, 300, 0};
      c.lens_kv = {3, 100, 128, 9300, 300};
      c.rooms = {99, 98, 60};
    });
  }
  return list;
}

}  // namespace flashgrad
