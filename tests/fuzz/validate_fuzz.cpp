// SPDX-License-Identifier: Apache-2.0
// Hostile arguments at the C interface. Two kinds of input: wild tensors, whose pointers, shapes
// and strides may be anything, are only asked about; real ones have exactly the memory that their
// shape and strides claim and are run, so that AddressSanitizer sees any access that a wrong
// acceptance leads to.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <string>
#include <vector>

#include "api/validate.hpp"
#include "flashgrad/flashgrad.h"

namespace {

void require(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "violated: %s (last error: %s)\n", what, fg_last_error());
    std::abort();
  }
}

constexpr std::array<DLDataType, 9> kTypes = {{{kDLFloat, 32, 1},
                                               {kDLBfloat, 16, 1},
                                               {kDLFloat, 16, 1},
                                               {kDLFloat, 64, 1},
                                               {kDLInt, 32, 1},
                                               {kDLInt, 64, 1},
                                               {kDLFloat, 32, 4},
                                               {kDLUInt, 0, 0},
                                               {kDLFloat, 8, 1}}};
constexpr DLDataType kI32{kDLInt, 32, 1};
constexpr DLDataType kI64{kDLInt, 64, 1};

// Holds what the DLTensors of one call point to; shapes and strides are as long as ndim says and no
// longer.
class Builder {
 public:
  explicit Builder(FuzzedDataProvider& bytes) : bytes_(bytes) {}

  // False once the bytes are used up.
  bool chance(int one_in) { return bytes_.ConsumeIntegralInRange<int>(1, one_in) == one_in; }

  // Numbers that such checks get wrong, and any other.
  std::int64_t wild_number() {
    constexpr std::array<std::int64_t, 20> kEdges = {0,
                                                     1,
                                                     2,
                                                     3,
                                                     4,
                                                     8,
                                                     64,
                                                     256,
                                                     257,
                                                     -1,
                                                     -2,
                                                     INT32_MAX,
                                                     std::int64_t{1} << 31,
                                                     std::int64_t{1} << 32,
                                                     std::int64_t{1} << 58,
                                                     std::int64_t{1} << 59,
                                                     std::int64_t{1} << 62,
                                                     INT64_MAX,
                                                     INT64_MIN,
                                                     INT64_MIN + 1};
    return chance(4) ? bytes_.ConsumeIntegral<std::int64_t>() : bytes_.PickValueInArray(kEdges);
  }

  std::int64_t small(std::int64_t low, std::int64_t high) {
    return bytes_.ConsumeIntegralInRange<std::int64_t>(low, high);
  }

  // `shape` is what would be right; each part is replaced now and then.
  const DLTensor* wild(std::initializer_list<std::int64_t> shape, DLDataType dtype, bool optional) {
    if (optional ? chance(2) : chance(30)) {
      return nullptr;
    }
    DLTensor& t = tensors_.emplace_back();
    std::vector<std::int64_t>& sizes = numbers_.emplace_back(shape);
    for (std::int64_t& size : sizes) {
      size = chance(12) ? wild_number() : size;
    }
    if (chance(30)) {
      sizes.resize(static_cast<std::size_t>(small(0, 6)), 1);
    }
    t.ndim = chance(60) ? bytes_.ConsumeIntegral<int>() : static_cast<int>(sizes.size());
    sizes.shrink_to_fit();
    t.shape = sizes.empty() || (chance(60) && t.ndim != 0) ? nullptr : sizes.data();
    t.strides = nullptr;
    if (chance(3)) {
      std::vector<std::int64_t>& strides = numbers_.emplace_back(sizes.size());
      for (std::int64_t& stride : strides) {
        stride = wild_number();
      }
      if (!strides.empty() && !chance(4)) {
        strides.back() = 1;
      }
      t.strides = strides.data();
    }
    t.dtype = chance(12) ? bytes_.PickValueInArray(kTypes) : dtype;
    t.device = {chance(20) ? static_cast<DLDeviceType>(small(1, 14)) : kDLCPU,
                chance(40) ? static_cast<int>(small(-1, 3)) : 0};
    t.data = reinterpret_cast<void*>(chance(2) ? bytes_.ConsumeIntegral<std::uintptr_t>()
                                               : std::uintptr_t{64} << small(0, 57));
    t.byte_offset = chance(3) ? bytes_.ConsumeIntegral<std::uint64_t>() : 0;
    return &t;
  }

  // Offsets and lengths are read by validation, so these have memory also in a wild call.
  const DLTensor* numbers(std::int64_t count, DLDataType dtype, std::int64_t low, std::int64_t high,
                          bool ascending) {
    DLTensor& t = tensors_.emplace_back();
    const auto entries = static_cast<std::size_t>(count);
    std::vector<std::int64_t> values(entries);
    for (std::int64_t& value : values) {
      value = chance(20) ? static_cast<std::int32_t>(wild_number()) : small(low, high);
    }
    if (ascending && !chance(10)) {
      std::sort(values.begin(), values.end());
    }
    std::vector<std::byte>& memory = memory_.emplace_back(entries * dtype.bits / 8);
    for (std::size_t i = 0; i < entries; ++i) {
      const auto narrow = static_cast<std::int32_t>(values[i]);
      std::memcpy(memory.data() + i * dtype.bits / 8,
                  dtype.bits == 32 ? static_cast<const void*>(&narrow) : &values[i],
                  dtype.bits / 8);
    }
    numbers_.emplace_back(1, count).shrink_to_fit();
    t = DLTensor{memory.data(), {kDLCPU, 0}, 1, dtype, numbers_.back().data(), nullptr, 0};
    return &t;
  }

  // Memory for every element that shape and strides reach, and for nothing else.
  const DLTensor* real(std::initializer_list<std::int64_t> shape, DLDataType dtype, bool optional,
                       bool may_repeat) {
    if (optional && chance(3)) {
      return nullptr;
    }
    DLTensor& t = tensors_.emplace_back();
    std::vector<std::int64_t>& sizes = numbers_.emplace_back(shape);
    if (chance(25)) {
      sizes[static_cast<std::size_t>(small(0, static_cast<std::int64_t>(sizes.size()) - 1))] =
          small(0, 9);
    }
    dtype = chance(25) ? kTypes[static_cast<std::size_t>(small(0, 5))] : dtype;
    std::vector<std::int64_t> strides(sizes.size());
    std::int64_t compact = 1;
    for (std::size_t k = sizes.size(); k-- > 0;) {
      strides[k] = compact;
      compact *= std::max<std::int64_t>(sizes[k], 1);
    }
    const bool null_strides = chance(2);
    if (!null_strides) {
      for (std::size_t k = 0; k + 1 < strides.size(); ++k) {
        strides[k] = chance(4) ? small(-80, 80) : strides[k] + (k == 0 ? small(0, 3) : 0);
      }
      if (may_repeat && chance(3)) {
        std::fill(strides.begin(), strides.end(), 0);
      }
    }
    std::int64_t low = 0;
    std::int64_t high = 1;
    for (std::size_t k = 0; k < sizes.size(); ++k) {
      const std::int64_t extent = (sizes[k] - 1) * strides[k];
      (extent < 0 ? low : high) += sizes[k] > 1 ? extent : 0;
    }
    if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
      low = high = 0;
    }
    const std::int64_t width = dtype.bits / 8;
    std::vector<std::byte>& memory =
        memory_.emplace_back(static_cast<std::size_t>((high - low) * width));
    memory.shrink_to_fit();
    // A few bytes decide the contents: mostly ordinary numbers, now and then any bits.
    const auto seed = bytes_.ConsumeIntegral<std::uint8_t>();
    for (std::size_t i = 0; i < memory.size(); ++i) {
      memory[i] = static_cast<std::byte>(seed < 200 ? 0x3c + i % 3 : seed * (i + 7));
    }
    t = DLTensor{memory.data() - low * width,
                 {kDLCPU, 0},
                 static_cast<int>(sizes.size()),
                 dtype,
                 sizes.data(),
                 nullptr,
                 0};
    if (!null_strides) {
      numbers_.push_back(strides);
      t.strides = numbers_.back().data();
    }
    return &t;
  }

  fg_options options(bool wild) {
    fg_options o = FG_OPTIONS_INIT;
    o.window_left = chance(2) ? o.window_left : wild ? wild_number() : small(-9, 9);
    o.window_right = chance(2) ? o.window_right : wild ? wild_number() : small(-9, 9);
    o.alignment = static_cast<fg_alignment>(chance(20) ? bytes_.ConsumeIntegral<int>()
                                                       : static_cast<int>(small(0, 1)));
    o.scale = chance(2) ? o.scale : chance(3) ? bytes_.ConsumeFloatingPoint<double>() : 0.5;
    o.softcap = chance(2) ? 0 : chance(3) ? bytes_.ConsumeFloatingPoint<double>() : 15;
    o.deterministic = bytes_.ConsumeBool() ? 1 : 0;
    o.num_threads = chance(20) ? bytes_.ConsumeIntegral<std::int32_t>()
                               : static_cast<std::int32_t>(small(0, 2));
    o.max_seqlen_q = chance(2) ? 0 : wild ? wild_number() : small(0, 9);
    o.max_seqlen_kv = chance(2) ? 0 : wild ? wild_number() : small(0, 9);
    if (chance(8)) {
      name_ = bytes_.ConsumeRandomLengthString(12);
      o.backend = name_.c_str();
    }
    return o;
  }

 private:
  FuzzedDataProvider& bytes_;
  std::deque<DLTensor> tensors_;
  std::deque<std::vector<std::int64_t>> numbers_;
  std::deque<std::vector<std::byte>> memory_;
  std::string name_;
};

struct Dims {
  bool packed;
  std::int64_t batch, seqlen_q, seqlen_kv, heads_kv, group, head_dim, head_dim_v;
  DLDataType dtype, statistics;

  explicit Dims(Builder& b)
      : packed(b.chance(2)),
        batch(b.small(0, 3)),
        seqlen_q(b.small(0, 9)),
        seqlen_kv(b.small(0, 9)),
        heads_kv(b.small(1, 3)),
        group(b.small(1, 2)),
        head_dim(b.small(1, 18)),
        head_dim_v(b.small(1, 18)),
        dtype(kTypes[static_cast<std::size_t>(b.small(0, 3))]),
        statistics(dtype.bits == 64 ? dtype : kTypes[0]) {}
};

// Calls make(shape, dtype, optional, may_repeat) for every tensor of rows, and numbers() for the
// rest.
template <class Make>
fg_tensors make_tensors(Builder& b, const Dims& d, Make&& make) {
  const auto rows = [&](std::int64_t seqlen, std::int64_t heads, std::int64_t dim, bool optional,
                        bool may_repeat) {
    return d.packed ? make({seqlen, heads, dim}, d.dtype, optional, may_repeat)
                    : make({d.batch, seqlen, heads, dim}, d.dtype, optional, may_repeat);
  };
  const std::int64_t heads_q = d.heads_kv * d.group;
  const auto lse = [&](bool may_repeat) {
    return d.packed ? make({heads_q, d.seqlen_q}, d.statistics, true, may_repeat)
                    : make({d.batch, heads_q, d.seqlen_q}, d.statistics, true, may_repeat);
  };
  fg_tensors t = FG_TENSORS_INIT;
  t.q = rows(d.seqlen_q, heads_q, d.head_dim, false, false);
  t.k = rows(d.seqlen_kv, d.heads_kv, d.head_dim, false, false);
  t.v = rows(d.seqlen_kv, d.heads_kv, d.head_dim_v, false, false);
  t.out = rows(d.seqlen_q, heads_q, d.head_dim_v, false, false);
  t.lse = lse(false);
  t.dout = rows(d.seqlen_q, heads_q, d.head_dim_v, true, true);
  t.dlse = lse(true);
  t.dq = rows(d.seqlen_q, heads_q, d.head_dim, true, false);
  t.dk = rows(d.seqlen_kv, d.heads_kv, d.head_dim, true, false);
  t.dv = rows(d.seqlen_kv, d.heads_kv, d.head_dim_v, true, false);
  t.sinks = make({heads_q}, d.statistics, true, false);
  t.dsinks = make({heads_q}, d.statistics, true, false);
  const auto count = [&b](std::int64_t right) { return b.chance(25) ? b.small(0, 5) : right; };
  if (d.packed || b.chance(30)) {
    t.cu_seqlens_q = b.numbers(count(d.batch + 1), kI32, 0, d.seqlen_q, true);
    t.cu_seqlens_kv =
        b.chance(40) ? nullptr : b.numbers(count(d.batch + 1), kI32, 0, d.seqlen_kv, true);
  }
  t.seqused_q =
      b.chance(2) ? nullptr : b.numbers(count(d.batch), kI32, 0, d.packed ? 2 : d.seqlen_q, false);
  t.seqused_kv =
      b.chance(2) ? nullptr : b.numbers(count(d.batch), kI32, 0, d.packed ? 2 : d.seqlen_kv, false);
  t.q_offset = b.chance(2) ? nullptr : b.numbers(count(d.batch), kI64, -9, 9, false);
  return t;
}

// What both queries promise. Returns their status.
fg_status ask(fg_pass pass, const fg_tensors& t, const fg_options& o, std::size_t* minimum,
              std::size_t* preferred) {
  const char* backend = nullptr;
  const fg_status supports = fg_supports(pass, &t, &o, &backend);
  const fg_status size = fg_workspace_size(pass, &t, &o, minimum, preferred);
  require(supports == size, "both queries agree");
  require(
      supports == FG_OK ? backend != nullptr && *minimum <= *preferred : fg_last_error()[0] != '\0',
      "an answer or a message");
  require(supports == FG_OK || supports == FG_INVALID_ARGUMENT || supports == FG_UNSUPPORTED,
          "queries only refuse");
  return supports;
}

void ask_about_wild_tensors(Builder& b) {
  const Dims dims(b);
  fg_tensors t = make_tensors(b, dims,
                              [&b](std::initializer_list<std::int64_t> shape, DLDataType dtype,
                                   bool optional, bool) { return b.wild(shape, dtype, optional); });
  fg_options o = b.options(true);
  if (b.chance(20)) {
    t.struct_size = static_cast<std::size_t>(b.small(0, sizeof(t)));
  }
  if (b.chance(20)) {
    o.struct_size = static_cast<std::size_t>(b.small(0, sizeof(o)));
  }
  for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD, static_cast<fg_pass>(2)}) {
    std::size_t minimum = 0;
    std::size_t preferred = 0;
    const fg_status status = ask(pass, t, o, &minimum, &preferred);
    if (pass != FG_FORWARD && pass != FG_BACKWARD) {
      require(status == FG_INVALID_ARGUMENT, "there are two passes");
      continue;
    }
    // The checks that calls add, on pointers that nobody follows.
    const flashgrad::Scratch scratch{reinterpret_cast<const void*>(b.wild_number()),
                                     static_cast<std::size_t>(b.wild_number())};
    flashgrad::Call call;
    const flashgrad::Status judged = flashgrad::validate(
        pass == FG_FORWARD ? flashgrad::Pass::kForward : flashgrad::Pass::kBackward, &t, &o,
        &scratch, &call);
    require(judged.ok() == judged.message.empty(), "a message if and only if it is refused");
    require(status != FG_INVALID_ARGUMENT || o.backend != nullptr || !judged.ok(),
            "what a query refuses, the call refuses");
  }
}

void run_real_tensors(Builder& b) {
  const Dims dims(b);
  const fg_tensors t =
      make_tensors(b, dims,
                   [&b](std::initializer_list<std::int64_t> shape, DLDataType dtype, bool optional,
                        bool may_repeat) { return b.real(shape, dtype, optional, may_repeat); });
  const fg_options o = b.options(false);
  for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
    std::size_t minimum = 0;
    std::size_t preferred = 0;
    const fg_status status = ask(pass, t, o, &minimum, &preferred);
    const bool short_of_it = status == FG_OK && minimum > 0 && b.chance(8);
    const std::size_t bytes = short_of_it ? minimum - 1 : b.chance(2) ? minimum : preferred;
    // Any alignment will do.
    const auto shift = static_cast<std::size_t>(b.small(0, 7));
    std::vector<std::byte> workspace(bytes + shift);
    const auto run = pass == FG_FORWARD ? fg_forward : fg_backward;
    const fg_status ran =
        run(&t, &o, bytes == 0 ? nullptr : workspace.data() + shift, bytes, nullptr);
    if (status != FG_OK) {
      // The call also reads lengths, before it looks for a backend.
      require(ran == status || ran == FG_INVALID_ARGUMENT,
              "what a query refuses, the call refuses alike");
    } else if (short_of_it) {
      require(ran == FG_WORKSPACE_TOO_SMALL || ran == FG_INVALID_ARGUMENT,
              "a small workspace is refused");
    } else {
      require(ran == FG_OK || ran == FG_INVALID_ARGUMENT,
              "what a query takes, the call takes or finds fault with the data");
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider bytes(data, size);
  Builder builder(bytes);
  if (bytes.ConsumeBool()) {
    ask_about_wild_tensors(builder);
  } else {
    run_real_tensors(builder);
  }
  return 0;
}
