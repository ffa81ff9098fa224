// SPDX-License-Identifier: Apache-2.0
// Implements simulator_memory.hpp.
#include "plan/simulator_memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "core/dtype.hpp"

namespace flashgrad::plan {
namespace {

constexpr std::size_t kCellBytes = 64;

bool is_before(const Moment& moment, const Clock& clock) {
  const auto agent = static_cast<std::size_t>(moment.agent);
  return moment.agent < 0 || (agent < clock.size() && clock[agent] >= moment.time);
}

std::size_t address(const View& view, int row, int column) {
  if (view.fold > 0 && column >= view.fold) {
    row += view.rows;
    column -= view.fold;
  }
  return static_cast<std::size_t>(view.offset) +
         static_cast<std::size_t>(row) * static_cast<std::size_t>(view.stride) +
         static_cast<std::size_t>(column * size_of(view.element));
}

// The tensors in the order of GlobalTensor.
template <class Visit>
void for_each_global(HeadData& data, Visit&& visit) {
  for (auto* tensor : {&data.q, &data.k, &data.v, &data.dout}) {
    visit(tensor->data(), tensor->size() * 2);
  }
  for (auto* tensor : {&data.lse_log2, &data.delta, &data.dq, &data.dk, &data.dv}) {
    visit(tensor->data(), tensor->size() * 4);
  }
  visit(data.ds.data(), data.ds.size() * 2);
}

}  // namespace

void join(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (std::size_t i = 0; i < other.size(); ++i) {
    clock[i] = std::max(clock[i], other[i]);
  }
}

Memories::Memories(const Program& program, HeadData& data, const std::vector<Agent>& agents,
                   std::vector<Fault>& faults)
    : data_(data), agents_(agents), faults_(faults) {
  const auto add = [this](Store store, std::size_t bytes, std::size_t cells) -> Space& {
    Space space;
    space.bytes.resize(bytes);
    space.cells.resize(cells);
    std::vector<Space>& list = spaces_[static_cast<std::size_t>(store)];
    list.push_back(std::move(space));
    return list.back();
  };
  const auto add_bytes = [&](Store store, std::size_t bytes) -> Space& {
    return add(store, bytes, bytes / kCellBytes + 1);
  };
  // Twice what there is: what does not fit is a fault of the program, not of the simulator.
  for (int cta = 0; cta < program.ctas; ++cta) {
    add_bytes(Store::kShared, std::size_t{2} * kSharedBytes);
    // A cell of tensor memory is a column of all lanes.
    add(Store::kTensor, std::size_t{2} * kTensorLanes * kTensorRowBytes,
        std::size_t{2} * kTensorColumns);
  }
  for (const int bytes : program.register_bytes) {
    add_bytes(Store::kRegisters, static_cast<std::size_t>(bytes));
  }
  for_each_global(data, [&](const void* source, std::size_t bytes) {
    Space& space = add_bytes(Store::kGlobal, bytes);
    std::memcpy(space.bytes.data(), source, bytes);
    for (Cell& cell : space.cells) {
      cell.written = true;
      cell.value = "input";
    }
  });
}

void Memories::read_back() {
  std::size_t tensor = 0;
  for_each_global(data_, [&](void* target, std::size_t bytes) {
    const std::vector<Space>& all = spaces_[static_cast<std::size_t>(Store::kGlobal)];
    std::memcpy(target, all[tensor++].bytes.data(), bytes);
  });
}

std::string Memories::who(int agent) const {
  if (agent < 0) {
    return "the caller";
  }
  const Agent& a = agents_[static_cast<std::size_t>(agent)];
  return fmt::format("{} of CTA {}", a.name, a.cta);
}

std::vector<std::size_t> Memories::cells(const View& view) {
  std::vector<std::size_t> list;
  const bool tensor = view.store == Store::kTensor;
  const std::size_t size = tensor ? 4 : kCellBytes;
  const int columns = view.fold > 0 ? view.fold : view.columns;
  for (int row = 0; row < (tensor ? 1 : view.rows); ++row) {
    const std::size_t begin = address(view, row, 0);
    const std::size_t end = begin + static_cast<std::size_t>(columns * size_of(view.element));
    for (std::size_t cell = begin / size; cell * size < end; ++cell) {
      if (list.empty() || list.back() < cell) {
        list.push_back(cell);
      }
    }
  }
  return list;
}

bool Memories::find_fault(const Cell& cell, const Access& access, int reader, Fault::Kind* kind,
                          std::string* what) const {
  if (!cell.written) {
    *kind = Fault::Kind::kReadBeforeWrite;
    *what = "nothing was written there";
    return true;
  }
  if (cell.value != access.value || cell.step != access.step) {
    const bool was_here = std::find(cell.before.begin(), cell.before.end(),
                                    std::pair(access.value, access.step)) != cell.before.end();
    *kind = was_here ? Fault::Kind::kOverwritten : Fault::Kind::kReadBeforeWrite;
    *what = fmt::format("{} {} of tile {}, written by {}",
                        was_here ? "it was overwritten by" : "it still holds", cell.value,
                        cell.step, who(cell.write.agent));
    return true;
  }
  if (!is_before(cell.write, clock_of(reader))) {
    *kind = Fault::Kind::kUnordered;
    *what = "no barrier orders it after the write by " + who(cell.write.agent);
    return true;
  }
  return false;
}

void Memories::report(Fault::Kind kind, const std::string& message) {
  // An operation that touches several places may have the same to say of each.
  if (faults_.empty() || faults_.back().message != message) {
    faults_.push_back({kind, message});
  }
}

void Memories::check_read(const Operation& operation, const Access& access, int reader) {
  bool reported = false;
  for (const std::size_t index : cells(access.view)) {
    Cell& cell = space(access.view).cells[index];
    Fault::Kind kind{};
    std::string what;
    if (!reported && find_fault(cell, access, reader, &kind, &what)) {
      report(kind, fmt::format("tile {}: {} ({}) reads {} of tile {} in {}: {}", operation.step,
                               operation.name, who(reader), access.value, access.step,
                               access.view.place, what));
      reported = true;
    }
    const auto same = std::find_if(cell.reads.begin(), cell.reads.end(),
                                   [&](const Moment& m) { return m.agent == reader; });
    if (same == cell.reads.end()) {
      cell.reads.push_back(now(reader));
    } else {
      *same = now(reader);
    }
  }
}

void Memories::check_write(const Operation& operation, const Access& access, int writer) {
  bool reported = access.adds;  // additions may meet in any order
  for (const std::size_t index : cells(access.view)) {
    Cell& cell = space(access.view).cells[index];
    const auto check = [&](const char* what, const Moment& other) {
      if (!reported && !is_before(other, clock_of(writer))) {
        report(Fault::Kind::kUnordered,
               fmt::format("tile {}: {} ({}) writes {} to {} while {} may still {} {} of tile {}",
                           operation.step, operation.name, who(writer), access.value,
                           access.view.place, who(other.agent), what, cell.value, cell.step));
        reported = true;
      }
    };
    check("write", cell.write);
    for (const Moment& read : cell.reads) {
      check("read", read);
    }
    if (cell.written && (cell.value != access.value || cell.step != access.step)) {
      cell.before.emplace_back(cell.value, cell.step);
    }
    cell.value = access.value;
    cell.step = access.step;
    cell.written = true;
    cell.write = now(writer);
    cell.reads.clear();
  }
}

Matrix Memories::read(const Operation& operation, const Access& access, int reader) {
  check_read(operation, access, reader);
  const View& view = access.view;
  const std::vector<std::uint8_t>& bytes = space(view).bytes;
  Matrix matrix(view.rows, view.columns);
  for (int row = 0; row < view.rows; ++row) {
    for (int column = 0; column < view.columns; ++column) {
      const std::uint8_t* from = bytes.data() + address(view, row, column);
      if (view.element == Element::kBf16) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, from, 2);
        matrix.at(row, column) = bf16_to_f32(bits);
      } else {
        std::memcpy(&matrix.at(row, column), from, 4);
      }
    }
  }
  return matrix;
}

void Memories::write(const Operation& operation, const Access& access, const Matrix& matrix,
                     int writer) {
  check_write(operation, access, writer);
  const View& view = access.view;
  std::vector<std::uint8_t>& bytes = space(view).bytes;
  for (int row = 0; row < view.rows; ++row) {
    for (int column = 0; column < view.columns; ++column) {
      std::uint8_t* to = bytes.data() + address(view, row, column);
      float value = matrix.at(row, column);
      if (view.element == Element::kBf16) {
        const std::uint16_t bits = f32_to_bf16(value);
        std::memcpy(to, &bits, 2);
        continue;
      }
      if (access.adds) {
        float before = 0;
        std::memcpy(&before, to, 4);
        value += before;
      }
      std::memcpy(to, &value, 4);
    }
  }
}

}  // namespace flashgrad::plan
