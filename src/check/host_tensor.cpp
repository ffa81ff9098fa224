// SPDX-License-Identifier: Apache-2.0
// Guards, poison, sparse mappings, and the copies on a device.
#include "check/host_tensor.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "core/dtype.hpp"

namespace flashgrad::check {
namespace {

std::size_t width_bytes(DLDataType dtype) { return dtype.bits / 8U; }

double load(DLDataType dtype, const std::byte* p) {
  switch (dtype.code) {
    case kDLInt: {
      if (dtype.bits == 32) {
        std::int32_t x = 0;
        std::memcpy(&x, p, sizeof(x));
        return x;
      }
      std::int64_t x = 0;
      std::memcpy(&x, p, sizeof(x));
      return static_cast<double>(x);
    }
    case kDLBfloat:
      return load_f64(p, DType::kBF16, 0);
    default:
      return load_f64(p,
                      dtype.bits == 64   ? DType::kF64
                      : dtype.bits == 32 ? DType::kF32
                                         : DType::kF16,
                      0);
  }
}

void write_poison(std::byte* begin, std::byte* end) {
  constexpr std::uint64_t kFour = kPoison * 0x0001000100010001U;
  std::byte* p = begin;
  for (; end - p >= 8; p += 8) {
    std::memcpy(p, &kFour, sizeof(kFour));
  }
  for (; end - p >= 2; p += 2) {
    std::memcpy(p, &kPoison, sizeof(kPoison));
  }
}

bool is_poison(const std::byte* begin, const std::byte* end) {
  for (const std::byte* p = begin; p + 1 < end; p += 2) {
    if (std::memcmp(p, &kPoison, sizeof(kPoison)) != 0) {
      return false;
    }
  }
  return true;
}

std::vector<std::int64_t> compact_strides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t k = shape.size(); k-- > 0;) {
    strides[k] = stride;
    stride *= shape[k];
  }
  return strides;
}

// The lowest and the highest element offset that a tensor reaches from its first element.
std::pair<std::int64_t, std::int64_t> reach(const std::vector<std::int64_t>& shape,
                                            const std::vector<std::int64_t>& strides) {
  std::int64_t low = 0;
  std::int64_t high = 0;
  for (std::size_t k = 0; k < shape.size(); ++k) {
    const std::int64_t extent = shape[k] > 1 ? (shape[k] - 1) * strides[k] : 0;
    (extent < 0 ? low : high) += extent;
  }
  return {low, high};
}

// The room, in elements, that a tensor in a buffer of its own may count on being free after each of
// its last-dimension vectors.
std::int64_t gap_after_vector(const HostTensor& t) {
  std::int64_t gap = 32;
  const std::vector<std::int64_t>& shape = t.shape();
  for (std::size_t k = 0; k + 1 < shape.size(); ++k) {
    if (shape[k] > 1) {
      gap = std::min(gap, std::abs(t.strides()[k]) - shape.back());
    }
  }
  return std::max<std::int64_t>(gap, 0);
}

// Whether there is nothing but its elements in the buffer.
bool fills(const HostTensor& t) {
  return static_cast<std::size_t>(t.num_elements()) * width_bytes(t.dtype()) ==
         t.buffer()->size_bytes();
}

template <class F>
void for_each_gap(const HostTensor& t, F&& f) {
  const auto width = static_cast<std::int64_t>(width_bytes(t.dtype()));
  const std::int64_t size = t.shape().back();
  const std::int64_t gap = gap_after_vector(t);
  const std::byte* end = t.buffer()->data() + t.buffer()->size_bytes();
  for (std::int64_t n = 0; n < t.num_elements(); n += size) {
    std::byte* p = t.address(n) + size * width;
    f(p, p + std::min<std::int64_t>(gap * width, end - p));
  }
}

// Sets to 1 the 16-bit words of the buffer that are elements of the tensor.
void mark_elements(const HostTensor& t, std::vector<std::uint8_t>& used) {
  const std::size_t words = width_bytes(t.dtype()) / 2;
  const std::int64_t size = t.shape().back();
  const std::int64_t stride = t.strides().back();
  const std::int64_t apart = stride == 0 ? std::min<std::int64_t>(size, 1) : size;
  for (std::int64_t n = 0; n < t.num_elements(); n += size) {
    std::uint8_t* at = used.data() + (t.address(n) - t.buffer()->data()) / 2;
    if (stride == 1) {
      std::memset(at, 1, static_cast<std::size_t>(size) * words);
      continue;
    }
    for (std::int64_t c = 0; c < apart; ++c, at += stride * static_cast<std::int64_t>(words)) {
      std::memset(at, 1, words);
    }
  }
}

// Calls f(offset in bytes, rows) for what has to be copied of the tensor's buffer: all of it or, of
// a sparse one, the elements with the gaps after them, in as few blocks as they fall into.
template <class F>
void for_each_block(const HostTensor& t, F&& f) {
  const Buffer& buffer = *t.buffer();
  const auto width = static_cast<std::int64_t>(width_bytes(t.dtype()));
  const auto all_bytes = static_cast<std::int64_t>(buffer.size_bytes());
  if (!buffer.sparse() || fills(t)) {
    f(std::size_t{0}, Rows{buffer.size_bytes(), buffer.size_bytes()});
    return;
  }
  const std::int64_t size = t.shape().back();
  const std::int64_t row_bytes = (size + gap_after_vector(t)) * width;
  struct Block {
    std::int64_t offset = 0;
    std::int64_t width = 0;
    std::int64_t pitch = 0;
    std::int64_t count = 0;
  } block;
  const auto emit = [&] {
    if (block.count > 0) {
      // The gap after the last row may be cut off by the buffer's end.
      const std::int64_t last = block.offset + (block.count - 1) * block.pitch;
      const std::int64_t rest = std::min(block.width, all_bytes - last);
      const auto rows = [](std::int64_t bytes, std::int64_t pitch, std::int64_t count) {
        return Rows{static_cast<std::size_t>(bytes), static_cast<std::size_t>(pitch),
                    static_cast<std::size_t>(count)};
      };
      if (block.count > 1) {
        f(static_cast<std::size_t>(block.offset), rows(block.width, block.pitch, block.count - 1));
      }
      f(static_cast<std::size_t>(last), rows(rest, rest, 1));
    }
  };
  for (std::int64_t n = 0; n < t.num_elements(); n += size) {
    const std::int64_t offset = t.address(n) - buffer.data();
    if (block.count == 1 && offset == block.offset + block.width) {
      block.width += row_bytes;
    } else if (block.count == 1 && offset > block.offset + block.width) {
      block.pitch = offset - block.offset;
      block.count = 2;
    } else if (block.count > 1 && offset == block.offset + block.count * block.pitch) {
      ++block.count;
    } else {
      emit();
      block = {offset, row_bytes, row_bytes, 1};
    }
  }
  emit();
}

}  // namespace

void store(DLDataType dtype, std::byte* p, double value) {
  switch (dtype.code) {
    case kDLInt: {
      if (dtype.bits == 32) {
        const auto x = static_cast<std::int32_t>(value);
        std::memcpy(p, &x, sizeof(x));
      } else {
        const auto x = static_cast<std::int64_t>(value);
        std::memcpy(p, &x, sizeof(x));
      }
      break;
    }
    case kDLBfloat:
      store_f64(p, DType::kBF16, 0, value);
      break;
    default:
      store_f64(p,
                dtype.bits == 64   ? DType::kF64
                : dtype.bits == 32 ? DType::kF32
                                   : DType::kF16,
                0, value);
  }
}

Buffer::Buffer(std::size_t size_bytes) : size_bytes_(size_bytes + size_bytes % 2) {
  // [guard page of poison][...data][page that traps]: the end of the data touches the trap, so that
  // not even a read goes past it.
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t data_bytes = (size_bytes_ + page - 1) / page * page;
  mapping_bytes_ = page + data_bytes + page;
  mapping_ = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    throw std::bad_alloc();
  }
  auto* begin = static_cast<std::byte*>(mapping_);
  mprotect(begin + page + data_bytes, page, PROT_NONE);
  data_ = begin + page + (data_bytes - size_bytes_);
  write_poison(begin, begin + page);
  write_poison(begin + page, data_);
  if (!sparse()) {
    poison();
  }
}

Buffer::~Buffer() { munmap(mapping_, mapping_bytes_); }

void Buffer::poison() const {
  constexpr std::size_t kChunk = std::size_t{1} << 26;
#pragma omp parallel for if (size_bytes_ > kChunk)
  for (std::size_t begin = 0; begin < size_bytes_; begin += kChunk) {
    write_poison(data_ + begin, data_ + std::min(begin + kChunk, size_bytes_));
  }
}

bool Buffer::guards_intact() const {
  if (!is_poison(static_cast<const std::byte*>(mapping_), data_)) {
    return false;
  }
  if (device_.data() == nullptr) {
    return true;
  }
  std::array<std::byte, kGuardBytes> guard;
  const std::byte* begin = device_.data() + device_offset();
  for (const std::byte* from : {begin - kGuardBytes, begin + size_bytes_}) {
    download(from, guard.data(), {kGuardBytes, kGuardBytes});
    if (!is_poison(guard.data(), guard.data() + kGuardBytes)) {
      return false;
    }
  }
  return true;
}

std::size_t Buffer::device_offset() const {
  return kGuardBytes + reinterpret_cast<std::uintptr_t>(data_) % kDeviceAlignment;
}

std::byte* Buffer::device_data() {
  const std::size_t offset = device_offset();
  if (device_.data() == nullptr) {
    device_ = DeviceMemory(offset + size_bytes_ + kGuardBytes);
    std::array<std::byte, kGuardBytes> guard;
    write_poison(guard.data(), guard.data() + kGuardBytes);
    const Rows rows{kGuardBytes, kGuardBytes};
    upload(guard.data(), device_.data() + offset - kGuardBytes, rows);
    upload(guard.data(), device_.data() + offset + size_bytes_, rows);
  }
  return device_.data() + offset;
}

HostTensor::HostTensor(DLDataType dtype, const std::vector<std::int64_t>& shape)
    : HostTensor(dtype, shape, compact_strides(shape)) {}

HostTensor::HostTensor(DLDataType dtype, std::vector<std::int64_t> shape,
                       std::vector<std::int64_t> strides)
    : dtype_(dtype), shape_(std::move(shape)), strides_(std::move(strides)) {
  const auto [low, high] = reach(shape_, strides_);
  const std::int64_t size = num_elements() == 0 ? 0 : high - low + 1;
  buffer_ = std::make_shared<Buffer>(static_cast<std::size_t>(size) * width_bytes(dtype));
  offset_ = num_elements() == 0 ? 0 : -low;
  if (buffer_->sparse()) {
    poison();
  }
}

HostTensor::HostTensor(DLDataType dtype, std::vector<std::int64_t> shape,
                       std::vector<std::int64_t> strides, std::shared_ptr<Buffer> buffer,
                       std::int64_t offset)
    : dtype_(dtype),
      shape_(std::move(shape)),
      strides_(std::move(strides)),
      buffer_(std::move(buffer)),
      offset_(offset) {
  const auto [low, high] = reach(shape_, strides_);
  const auto size = static_cast<std::int64_t>(buffer_->size_bytes() / width_bytes(dtype));
  if (num_elements() > 0 && (offset_ + low < 0 || offset_ + high >= size)) {
    throw std::logic_error("HostTensor: reaches outside its buffer");
  }
}

const DLTensor* HostTensor::dl(Place place) {
  if (!given()) {
    return nullptr;
  }
  dl_.data = place == Place::kCuda ? buffer_->device_data() : buffer_->data();
  dl_.device = dl_device(place);
  dl_.ndim = static_cast<int>(shape_.size());
  dl_.dtype = dtype_;
  dl_.shape = shape_.data();
  dl_.strides = strides_.data();
  dl_.byte_offset = static_cast<std::uint64_t>(offset_) * width_bytes(dtype_);
  return &dl_;
}

void HostTensor::upload() const {
  for_each_block(*this, [this](std::size_t offset, const Rows& rows) {
    check::upload(buffer_->data() + offset, buffer_->device_data() + offset, rows);
  });
}

void HostTensor::download() const {
  for_each_block(*this, [this](std::size_t offset, const Rows& rows) {
    check::download(buffer_->device_data() + offset, buffer_->data() + offset, rows);
  });
}

std::int64_t HostTensor::num_elements() const {
  std::int64_t n = 1;
  for (const std::int64_t size : shape_) {
    n *= size;
  }
  return n;
}

std::byte* HostTensor::address(std::int64_t n) const {
  std::int64_t element = offset_;
  for (std::size_t k = shape_.size(); k-- > 0;) {
    element += n % shape_[k] * strides_[k];
    n /= shape_[k];
  }
  return buffer_->data() + element * static_cast<std::int64_t>(width_bytes(dtype_));
}

double HostTensor::get(std::int64_t n) const { return load(dtype_, address(n)); }

void HostTensor::set(std::int64_t n, double value) const { store(dtype_, address(n), value); }

void HostTensor::poison() const {
  if (!buffer_->sparse() || fills(*this)) {
    buffer_->poison();
    return;
  }
  const auto width = static_cast<std::int64_t>(width_bytes(dtype_));
  for (std::int64_t n = 0; n < num_elements(); n += shape_.back()) {
    std::byte* p = address(n);
    write_poison(p, p + shape_.back() * width);
  }
  for_each_gap(*this, [](std::byte* begin, std::byte* end) { write_poison(begin, end); });
}

std::uint64_t HostTensor::digest() const {
  const std::size_t width = width_bytes(dtype_);
  const std::int64_t size = shape_.back();
  const std::int64_t vectors = size == 0 ? 0 : num_elements() / size;
  const std::int64_t step = strides_.back() * static_cast<std::int64_t>(width);
  std::uint64_t digest = 0;
#pragma omp parallel for reduction(+ : digest) if (vectors * size > 100000)
  for (std::int64_t n = 0; n < vectors; ++n) {
    const std::byte* element = address(n * size);
    std::uint64_t hash = static_cast<std::uint64_t>(n) + 0xcbf29ce484222325U;
    // Eight bytes at a time, the last ones filled up with zeros.
    const std::int64_t per_word = 8 / static_cast<std::int64_t>(width);
    for (std::int64_t c = 0; c < size; c += per_word) {
      const std::int64_t count = std::min(per_word, size - c);
      std::uint64_t bits = 0;
      if (strides_.back() == 1 && count == per_word) {
        std::memcpy(&bits, element, sizeof(bits));
      } else {
        for (std::int64_t k = 0; k < count; ++k) {
          std::memcpy(reinterpret_cast<std::byte*>(&bits) + k * static_cast<std::int64_t>(width),
                      element + k * step, width);
        }
      }
      element += count * step;
      hash = (hash ^ bits) * 0x100000001b3U;
      hash ^= hash >> 29;
    }
    digest += hash * 0x9e3779b97f4a7c15U;
  }
  return digest;
}

std::string damaged_surroundings(const std::vector<NamedTensor>& tensors) {
  std::vector<const Buffer*> seen;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor->given()) {
      continue;
    }
    const Buffer* buffer = tensor->buffer().get();
    if (std::find(seen.begin(), seen.end(), buffer) != seen.end()) {
      continue;
    }
    seen.push_back(buffer);
    if (!buffer->guards_intact()) {
      return name;
    }
    if (buffer->sparse()) {
      bool intact = true;
      for_each_gap(*tensor, [&](std::byte* begin, std::byte* end) {
        intact = intact && is_poison(begin, end);
      });
      if (!intact) {
        return name;
      }
      continue;
    }
    // Elements of any of the tensors in this buffer, by 16-bit words; the rest must be poison.
    std::vector<std::uint8_t> used(buffer->size_bytes() / 2);
    std::size_t used_bytes = 0;
    for (const NamedTensor& other : tensors) {
      const HostTensor& t = *other.tensor;
      if (!t.given() || t.buffer().get() != buffer) {
        continue;
      }
      const std::size_t width = width_bytes(t.dtype());
      used_bytes += static_cast<std::size_t>(t.num_elements()) * width;
      if (used_bytes == buffer->size_bytes()) {
        break;  // no gap
      }
      mark_elements(t, used);
    }
    if (used_bytes == buffer->size_bytes()) {
      continue;
    }
    bool intact = true;
    for (std::size_t word = 0; word < used.size(); ++word) {
      std::uint16_t x;
      std::memcpy(&x, buffer->data() + 2 * word, sizeof(x));
      intact &= used[word] != 0 || x == kPoison;
    }
    if (!intact) {
      return name;
    }
  }
  return {};
}

}  // namespace flashgrad::check
