// SPDX-License-Identifier: Apache-2.0
// Cases of tens of gigabytes, which a host takes minutes to fill and to judge. Their batch holds
// the same few entries again and again: the first copy of each is judged by the oracle, every other
// one must be like it, and so each element of each tensor is looked at. They exist on the device
// only, and come to the host a piece at a time.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "check/workspace_memory.hpp"
#include "conformance.hpp"

namespace flashgrad::check {
namespace {

// Entries that differ. Where an offset has lost its upper bits, the entry found there is another
// one: neither 2^31 nor 2^32 elements or bytes are a multiple of so many entries of the table.
constexpr std::int64_t kEntries = 7;

std::size_t bytes_of(const HostTensor& t) {
  return static_cast<std::size_t>(t.num_elements()) * t.dtype().bits / 8;
}

// Whether bf16 gradients of size 0.1 and more differ by no more than roundings of ds and their own
// explain. One that belongs elsewhere would be off by its size.
bool is_near(const std::byte* x, const std::byte* y, std::size_t size_bytes) {
  for (std::size_t at = 0; at < size_bytes; at += 2) {
    const double a = load_f64(x + at, DType::kBF16, 0);
    const double b = load_f64(y + at, DType::kBF16, 0);
    if (!(std::abs(a - b) <= 0x1p-7 * std::abs(b) + 0x1p-8)) {
      return false;
    }
  }
  return true;
}

// A compact tensor of a larger batch than `first`, its first entries.
class Copies {
 public:
  Copies(const HostTensor& first, std::int64_t batch)
      : first_(first),
        period_bytes_(bytes_of(first)),
        bytes_(period_bytes_ / kEntries * static_cast<std::size_t>(batch)),
        memory_(kGuardBytes + bytes_ + kGuardBytes),
        shape_(first.shape()) {
    shape_.front() = batch;
    dl_.data = data();
    dl_.device = dl_device(Place::kCuda);
    dl_.ndim = static_cast<int>(shape_.size());
    dl_.dtype = first.dtype();
    dl_.shape = shape_.data();
  }
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;

  [[nodiscard]] const DLTensor* dl() const { return &dl_; }

  void upload() const {
    std::size_t done = std::min(period_bytes_, bytes_);
    check::upload(first_.buffer()->data(), data(), {done, done});
    while (done < bytes_) {
      const std::size_t more = std::min(done, bytes_ - done);
      copy_on_device(data(), data() + done, more);
      done += more;
    }
  }

  void download_first() const {
    check::download(data(), first_.buffer()->data(), {period_bytes_, period_bytes_});
  }

  // The first entry that is not that of `first`, or -1: of other bits, or if `rounded`, of numbers
  // farther away than rounding explains.
  [[nodiscard]] std::int64_t first_difference(std::vector<std::byte>& room, bool rounded) const {
    const std::byte* want = first_.buffer()->data();
    const std::size_t piece = std::max<std::size_t>(room.size() / period_bytes_, 1) * period_bytes_;
    room.resize(std::max(room.size(), piece));
    for (std::size_t begin = 0; begin < bytes_; begin += piece) {
      const std::size_t size = std::min(piece, bytes_ - begin);
      check::download(data() + begin, room.data(), {size, size});
      const std::size_t entry_bytes = period_bytes_ / kEntries;
      const auto entries = static_cast<std::int64_t>(size / entry_bytes);
      std::int64_t wrong = entries;
#pragma omp parallel for reduction(min : wrong)
      for (std::int64_t n = 0; n < entries; ++n) {
        const auto at = static_cast<std::size_t>(n) * entry_bytes;
        const std::byte* x = room.data() + at;
        const std::byte* y = want + at % period_bytes_;
        if (std::memcmp(x, y, entry_bytes) != 0 && !(rounded && is_near(x, y, entry_bytes))) {
          wrong = std::min(wrong, n);
        }
      }
      if (wrong < entries) {
        return static_cast<std::int64_t>(begin / entry_bytes) + wrong;
      }
    }
    return -1;
  }

  [[nodiscard]] bool guards_intact() const {
    std::vector<std::byte> guard(kGuardBytes);
    for (const std::byte* from : {data() - kGuardBytes, data() + bytes_}) {
      check::download(from, guard.data(), {kGuardBytes, kGuardBytes});
      if (std::any_of(guard.begin(), guard.end(), [](std::byte x) { return x != kFresh; })) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuardBytes = 4096;
  static constexpr std::byte kFresh{0xff};  // what DeviceMemory is full of
  [[nodiscard]] std::byte* data() const { return memory_.data() + kGuardBytes; }

  const HostTensor& first_;
  std::size_t period_bytes_;
  std::size_t bytes_;
  DeviceMemory memory_;
  std::vector<std::int64_t> shape_;
  DLTensor dl_{};
};

void call(fg_pass pass, const fg_tensors& t, const fg_options& options, WorkspaceMemory& memory) {
  std::size_t minimum = 0;
  std::size_t bytes = 0;
  ASSERT_EQ(fg_workspace_size(pass, &t, &options, &minimum, &bytes), FG_OK) << fg_last_error();
  void* const workspace = memory.resize(bytes, false, Place::kCuda);
  ASSERT_EQ(
      (pass == FG_FORWARD ? fg_forward : fg_backward)(&t, &options, workspace, bytes, nullptr),
      FG_OK)
      << fg_last_error();
  synchronize_device();
}

}  // namespace

// dq is added up from at most two key blocks, and no two query heads share a key head: so every bit
// is fixed without `deterministic` too, but for delta, which is summed in one order for the first
// units and in another for those that the main kernel prepares itself. dq and dk follow from it.
void expect_right_copies(const Case& c, const Target& target) {
  const Announce announce(c, target);
  ASSERT_TRUE(c.layout == Layout::kCompact && !c.packed() && c.heads_q == c.heads_kv);
  ASSERT_TRUE(c.seqlen_kv <= 256 && c.dtype == DType::kBF16);
  Case few = c;
  few.batch = kEntries;
  const CallTensors first = make_tensors(few);
  std::map<const HostTensor*, Copies> all;
  fg_tensors t = FG_TENSORS_INIT;
  const auto add = [&](const HostTensor& of, const DLTensor* fg_tensors::*member) {
    const auto [place, is_new] = all.try_emplace(&of, of, c.batch);
    t.*member = place->second.dl();
  };
  add(first.q, &fg_tensors::q);
  add(first.k, &fg_tensors::k);
  add(first.v, &fg_tensors::v);
  add(first.dout, &fg_tensors::dout);
  for (const auto& [tensor, copies] : all) {
    copies.upload();
  }
  add(first.out, &fg_tensors::out);
  add(first.lse, &fg_tensors::lse);
  add(first.dq, &fg_tensors::dq);
  add(first.dk, &fg_tensors::dk);
  add(first.dv, &fg_tensors::dv);
  fg_options options = make_options(c);
  options.backend = target.backend.c_str();
  WorkspaceMemory memory;
  for (const fg_pass pass : {FG_FORWARD, FG_BACKWARD}) {
    ASSERT_NO_FATAL_FAILURE(call(pass, t, options, memory));
    for (const NamedTensor& output : first.outputs(pass)) {
      if (output.tensor->given()) {
        all.at(output.tensor).download_first();
      }
    }
  }
  EXPECT_TRUE(memory.guards_intact());
  std::vector<std::byte> room(std::size_t{1} << 30);
  for (const NamedTensor& tensor : first.all()) {
    if (tensor.tensor->given()) {
      const Copies& copies = all.at(tensor.tensor);
      EXPECT_TRUE(copies.guards_intact()) << tensor.name;
      const bool rounded = tensor.tensor == &first.dq || tensor.tensor == &first.dk;
      EXPECT_EQ(copies.first_difference(room, rounded), -1) << "batch entry of " << tensor.name;
    }
  }
  CallTensors judged = first;
  options.backend = nullptr;
  for (const OutputResult& o :
       judge(judged.c_tensors(), options, false, {.max_flops = kOracleFlops}).outputs) {
    EXPECT_TRUE(o.ok) << o.name << ": error " << o.error << ", bound " << o.bound << "; "
                      << o.reason;
  }
}

}  // namespace flashgrad::check
