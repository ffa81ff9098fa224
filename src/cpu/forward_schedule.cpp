// SPDX-License-Identifier: Apache-2.0
// The scheduler of the CPU's forward pass: who packs which key block, who computes which rows, and
// when.
//
// All work is one list of tickets, taken in ascending order. Per (sequence, kv head) it holds one
// ticket for each key block to pack, if blocks are shared, and then one for each item, heaviest
// (last rows) first. A ticket waits only for lower ones: an item for the packs of its head, a pack
// for the items that still read the slot it overwrites. Lower tickets have started, so nothing
// deadlocks.
#include "cpu/forward_schedule.hpp"

#include <atomic>
#include <cstring>
#include <limits>
#include <new>

#include "cpu/arena.hpp"
#include "cpu/parallel.hpp"
#include "cpu/spin.hpp"

namespace flashgrad::cpu {
namespace {

// The packed key blocks of one kv head, shared by all threads, then those of a later one.
struct alignas(128) Slot {
  std::atomic<std::int64_t> generation{0};  // how many heads have used the slot and are done
  std::atomic<std::int64_t> packed{0};      // key blocks that the present head has packed
  std::atomic<std::int64_t> finished{0};    // items that the present head has finished
};

struct Plan {
  std::int64_t query_block = 0;
  ForwardSizes sizes;
  std::int64_t num_threads = 0;
  std::int64_t num_slots = 0;
  std::int64_t blocks_per_slot = 0;
  std::size_t thread_bytes = 0;
  std::size_t slot_bytes = 0;

  [[nodiscard]] std::size_t bytes() const {
    return Arena::kAlignment + static_cast<std::size_t>(num_threads) * thread_bytes +
           static_cast<std::size_t>(num_slots) * slot_bytes;
  }
};

ForwardScratch carve_scratch(const ForwardSizes& sizes, std::int64_t panel, Arena& arena) {
  ForwardScratch scratch;
  scratch.q = arena.take<float>(sizes.rows * sizes.padded_head_words);
  scratch.staging = arena.take<float>(sizes.staging_words);
  scratch.s = arena.take<float>(sizes.keys * std::min(sizes.rows, panel));
  scratch.p = arena.take<float>(sizes.keys / sizes.unit * std::min(sizes.rows, panel));
  scratch.out = arena.take<float>(sizes.rows * sizes.columns);
  scratch.row_max = arena.take<float>(sizes.rows);
  scratch.row_sum = arena.take<float>(sizes.rows);
  scratch.row_rescale = arena.take<float>(sizes.rows);
  scratch.keys_begin = arena.take<std::int64_t>(sizes.rows);
  scratch.keys_end = arena.take<std::int64_t>(sizes.rows);
  scratch.block = arena.take<float>(sizes.block_words);
  return scratch;
}

// Key blocks are shared where several items read several of them; one block stays with the thread
// that packed it.
bool shares_blocks(std::int64_t num_blocks, std::int64_t num_items) {
  return num_blocks > 1 && num_items > 1;
}

// The fastest plan that fits.
Plan make_plan(const Problem& p, const ForwardKernels& kernels, std::size_t bytes) {
  Plan plan;
  const std::int64_t threads = std::max(p.num_threads, 1);
  const std::int64_t kv_heads = p.batch * p.heads_kv;
  const auto items = [&](std::int64_t query_block) {
    return ForwardItemGrid::of(p.max_seqlen_q, p.group(), query_block).count();
  };
  plan.query_block = kForwardQueryBlock;
  while (plan.query_block > kForwardMinQueryBlock &&
         kv_heads * items(plan.query_block) < 4 * threads) {
    plan.query_block /= 2;
  }
  plan.sizes = ForwardSizes::of(p, kernels.unit, kernels.lanes, plan.query_block);

  Arena thread_arena;
  carve_scratch(plan.sizes, kernels.panel, thread_arena);
  plan.thread_bytes = thread_arena.used_bytes();
  plan.blocks_per_slot = ceil_div(p.max_seqlen_kv, kForwardKeyBlock);
  Arena slot_arena;
  slot_arena.take<Slot>(1);
  slot_arena.take<float>(plan.blocks_per_slot * plan.sizes.block_words);
  plan.slot_bytes = slot_arena.used_bytes();

  const std::size_t room = bytes - std::min(bytes, Arena::kAlignment);
  const std::int64_t items_per_head = items(plan.query_block);
  const auto limit = [](std::size_t count, std::int64_t want) {
    return count < static_cast<std::size_t>(want) ? static_cast<std::int64_t>(count) : want;
  };
  plan.num_threads = limit(room / plan.thread_bytes,
                           std::clamp<std::int64_t>(kv_heads * items_per_head, 1, threads));
  if (shares_blocks(plan.blocks_per_slot, items_per_head)) {
    // One slot more than the threads can work on at once, so that the next head is packed
    // meanwhile.
    const std::int64_t slots = std::min(kv_heads, ceil_div(plan.num_threads, items_per_head) + 1);
    plan.num_slots = limit(
        (room - static_cast<std::size_t>(plan.num_threads) * plan.thread_bytes) / plan.slot_bytes,
        slots);
  }
  return plan;
}

// Finds the (sequence, kv head) of ascending tickets.
class Cursor {
 public:
  Cursor(const Problem& p, const Args& args, const Plan& plan) : p_(p), args_(args), plan_(plan) {
    load();
  }

  // Moves on to the head that `ticket` belongs to; false if the list ends before it.
  bool seek(std::int64_t ticket) {
    while (batch_ < p_.batch && ticket >= first_ticket_ + num_packs() + num_items_) {
      first_ticket_ += num_packs() + num_items_;
      shared_heads_ += shared_ ? 1 : 0;
      if (num_items_ == 0 || ++head_kv_ == p_.heads_kv) {
        head_kv_ = 0;
        ++batch_;
        load();
      }
    }
    return batch_ < p_.batch;
  }

  // The ticket's number within its head; the first num_packs() of them are packs.
  [[nodiscard]] std::int64_t local(std::int64_t ticket) const { return ticket - first_ticket_; }
  [[nodiscard]] std::int64_t num_packs() const { return shared_ ? num_blocks_ : 0; }
  [[nodiscard]] std::int64_t num_items() const { return num_items_; }
  [[nodiscard]] bool shared() const { return shared_; }
  [[nodiscard]] std::int64_t slot() const { return shared_heads_ % plan_.num_slots; }
  [[nodiscard]] std::int64_t generation() const { return shared_heads_ / plan_.num_slots; }
  [[nodiscard]] std::int64_t head_kv() const { return head_kv_; }
  [[nodiscard]] std::int64_t first_block() const { return first_block_; }
  [[nodiscard]] const Sequence& sequence() const { return sequence_; }

  // Item `index` of the head: last rows first, for they see the most keys of a causal mask; heads
  // fastest.
  [[nodiscard]] ForwardItem item(std::int64_t index) const {
    const std::int64_t head_item = index % grid_.head_items;
    const std::int64_t query_block = grid_.query_blocks - 1 - index / grid_.head_items;
    ForwardItem item;
    const std::int64_t first = head_item * grid_.heads_per_item;
    item.batch = batch_;
    item.head_kv = head_kv_;
    item.first_head = head_kv_ * p_.group() + first;
    item.num_heads = std::min(grid_.heads_per_item, p_.group() - first);
    item.rows.begin = query_block * plan_.query_block;
    item.rows.end = std::min(item.rows.begin + plan_.query_block, sequence_.band.seqlen_q);
    return item;
  }

 private:
  void load() {
    num_items_ = 0;
    shared_ = false;
    if (batch_ == p_.batch || p_.heads_kv == 0) {
      return;
    }
    sequence_ = flashgrad::sequence(p_, args_, batch_);
    grid_ = ForwardItemGrid::of(sequence_.band.seqlen_q, p_.group(), plan_.query_block);
    num_items_ = grid_.count();
    const Range keys = sequence_.band.kv_range(0, sequence_.band.seqlen_q);
    first_block_ = keys.begin / kForwardKeyBlock;
    num_blocks_ = keys.empty() ? 0 : ceil_div(keys.end, kForwardKeyBlock) - first_block_;
    shared_ = plan_.num_slots > 0 && shares_blocks(num_blocks_, num_items_);
  }

  const Problem& p_;
  const Args& args_;
  const Plan& plan_;
  std::int64_t batch_ = 0;
  std::int64_t head_kv_ = 0;
  Sequence sequence_;
  ForwardItemGrid grid_;
  std::int64_t num_items_ = 0;
  std::int64_t first_block_ = 0;  // of those that some row sees
  std::int64_t num_blocks_ = 0;
  bool shared_ = false;
  std::int64_t first_ticket_ = 0;
  std::int64_t shared_heads_ = 0;  // before this one
};

// The problem with the lengths that its sequences really have as bounds: from packed offsets and
// seqused, which only a call can read. Shorter blocks and more slots then fit into the same
// workspace.
Problem with_exact_bounds(const Problem& p, const Args& args) {
  Problem exact = p;
  exact.max_seqlen_q = 0;
  exact.max_seqlen_kv = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const Band band = sequence(p, args, b).band;
    exact.max_seqlen_q = std::max(exact.max_seqlen_q, band.seqlen_q);
    exact.max_seqlen_kv = std::max(exact.max_seqlen_kv, band.seqlen_kv);
  }
  return exact;
}

// Rows that belong to no sequence.
void fill_unused(const Problem& p, const Args& args) {
  for_each_unused_q(p, args, [&](std::int64_t batch, Range rows) {
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
      for (std::int64_t h = 0; h < p.heads_q; ++h) {
        // All bits 0 is 0 in every dtype.
        std::memset(static_cast<std::byte*>(args.out.data) +
                        args.out.offset(batch, i, h) * size_bytes(args.out.dtype),
                    0,
                    static_cast<std::size_t>(p.head_dim_v) *
                        static_cast<std::size_t>(size_bytes(args.out.dtype)));
        if (args.lse) {
          static_cast<float*>(args.lse.data)[args.lse.offset(batch, i, h)] =
              -std::numeric_limits<float>::infinity();
        }
      }
    }
  });
}

}  // namespace

WorkspaceSize forward_workspace(const Problem& p, const ForwardKernels& kernels) {
  const Plan best = make_plan(p, kernels, std::numeric_limits<std::size_t>::max());
  Plan least = best;
  least.num_threads = 1;
  least.num_slots = 0;
  return {least.bytes(), best.bytes()};
}

void schedule_forward(const Problem& p, const Args& args, const ForwardKernels& kernels) {
  fill_unused(p, args);
  const Plan plan = make_plan(with_exact_bounds(p, args), kernels, args.workspace_bytes);
  Arena arena(args.workspace);
  const auto slot_bytes = static_cast<std::int64_t>(plan.slot_bytes);
  auto* const slots = arena.take<std::byte>(plan.num_slots * slot_bytes);
  auto* const scratch_base =
      arena.take<std::byte>(plan.num_threads * static_cast<std::int64_t>(plan.thread_bytes));
  for (std::int64_t i = 0; i < plan.num_slots; ++i) {
    new (slots + i * slot_bytes) Slot;
  }
  const ForwardCall call{p, args, plan.sizes};
  std::atomic<std::int64_t> next_ticket{0};

  run_threads(static_cast<int>(plan.num_threads), [&](int thread, int /*threads*/) {
    Arena thread_arena(scratch_base + thread * static_cast<std::int64_t>(plan.thread_bytes));
    ForwardScratch scratch = carve_scratch(plan.sizes, kernels.panel, thread_arena);
    Cursor cursor(p, args, plan);
    for (;;) {
      const std::int64_t ticket = next_ticket.fetch_add(1, std::memory_order_relaxed);
      if (!cursor.seek(ticket)) {
        break;
      }
      const std::int64_t index = cursor.local(ticket);
      if (!cursor.shared()) {
        kernels.run_item(call, cursor.sequence(), cursor.item(index), scratch);
        continue;
      }
      std::byte* const memory = slots + cursor.slot() * slot_bytes;
      Slot& slot = *std::launder(reinterpret_cast<Slot*>(memory));
      std::byte* const blocks = memory + sizeof(Slot);
      if (index < cursor.num_packs()) {
        spin_until(
            [&] { return slot.generation.load(std::memory_order_acquire) == cursor.generation(); });
        kernels.pack_block(call, cursor.sequence(), cursor.head_kv(),
                           (cursor.first_block() + index) * kForwardKeyBlock,
                           blocks + index * plan.sizes.block_bytes());
        slot.packed.fetch_add(1, std::memory_order_release);
        continue;
      }
      // The generation comes first: the count of the slot's earlier head may be the same.
      spin_until([&] {
        return slot.generation.load(std::memory_order_acquire) == cursor.generation() &&
               slot.packed.load(std::memory_order_acquire) == cursor.num_packs();
      });
      ForwardItem item = cursor.item(index - cursor.num_packs());
      item.blocks = blocks;
      item.first_block = cursor.first_block();
      kernels.run_item(call, cursor.sequence(), item, scratch);
      if (slot.finished.fetch_add(1, std::memory_order_acq_rel) + 1 == cursor.num_items()) {
        slot.packed.store(0, std::memory_order_relaxed);
        slot.finished.store(0, std::memory_order_relaxed);
        slot.generation.fetch_add(1, std::memory_order_release);
      }
    }
  });
}

}  // namespace flashgrad::cpu
