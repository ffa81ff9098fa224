// SPDX-License-Identifier: Apache-2.0
// The backward pass of the CPU backend, as a template over the instruction set.
//
// A job is one kv head of one sequence with its group of query heads. Its work is two kinds of
// tasks: packing a block of query rows (backward_pack.hpp), then one task per key block
// (backward_block.hpp), which needs all packs of the job. Jobs run in one of three ways, with the
// same bits:
//   - nothing visible: zeros are written;
//   - alone: a small job is one thread's, from packs to outputs, in that thread's memory; threads
//     never wait for each other;
//   - in waves: as many jobs as fit the memory, or as give the threads enough to do, share their
//     tasks among all threads. Key blocks are taken in ascending order, heads fastest. With room
//     for two waves, threads that find no task left go on to the next one.
//
// Workspace: per thread its key block's buffers and the packs of a small job; one or two waves of
// packs; dsinks' partial sums. It grows linearly with the sequence length, the minimum holds one
// job.
#pragma once

#include "core/backend.hpp"
#include "cpu/backward_block.hpp"
#include "cpu/backward_wave.hpp"
#include "cpu/parallel.hpp"

namespace flashgrad::cpu {

// Jobs up to this many multiply-adds a product, with one key block, run alone: about 10 us, too
// short to share.
inline constexpr std::int64_t kAloneWork = 1 << 21;
// Rows that the packs of a job that runs alone may have (over the group; a whole panel per head is
// always allowed).
inline constexpr std::int64_t kAloneRows = 512;
// Key-block tasks per thread that a wave has at least (if memory allows).
inline constexpr std::int64_t kTasksPerThread = 4;
// More than this for the packs of a wave is not asked for, unless a single head needs it.
inline constexpr std::int64_t kWaveBytes = std::int64_t{256} << 20;

template <class Isa>
class Backward {
 public:
  Backward(const Problem& p, const Args& args)
      : p_(p), args_(args), plan_(p), num_jobs_(p.batch * p.heads_kv) {}

  static WorkspaceSize workspace_size(const Problem& p) {
    const Args no_data;
    const Backward backward(p, no_data);
    Arena fixed;
    backward.take_fixed(fixed, p.num_threads, nullptr);
    const std::size_t base = fixed.used_bytes() + Arena::kAlignment;
    if (backward.num_jobs_ == 0) {
      return {base, base};
    }
    const std::size_t whole = backward.job_bytes(p.max_seqlen_q, p.group());
    const std::size_t sums = backward.group_sums_bytes();
    const std::size_t one = sums + backward.job_bytes(p.max_seqlen_q, 1);
    const std::size_t some = sums + std::size_t{kWaveBytes};
    const std::size_t minimum = whole < one ? whole : one;
    if (whole > one && whole > some) {
      return {base + minimum, base + (one > some ? one : some)};
    }
    const std::int64_t wave_jobs = backward.wave_jobs(p.num_threads);
    const std::int64_t waves = backward.num_jobs_ > wave_jobs ? 2 : 1;
    return {base + minimum, base + static_cast<std::size_t>(waves * wave_jobs) * whole};
  }

  void run() {
    Arena arena(args_.workspace);
    Fixed fixed;
    take_fixed(arena, p_.num_threads, &fixed);
    sink_partials_ = fixed.sink_partials;
    threads_ = fixed.threads;
    setup_waves(fixed, arena);
    run_threads(useful_threads(), [&](int thread, int num_threads) {
      zero_unused(thread, num_threads);
      run_alone(threads_[thread], num_threads);
      run_waves(threads_[thread], num_threads);
    });
    finish_sinks();
  }

 private:
  struct Thread {
    KeyBlockBuffers<Isa> buffers;
    std::byte* alone;  // packs of a job that runs alone
  };

  struct Fixed {
    Thread* threads;        // (num_threads)
    double* sink_partials;  // (batch, heads_q)
    Wave<Isa>* waves;       // (2)
    Job<Isa>* jobs;         // (2, kMaxWaveJobs)
  };

  void take_fixed(Arena& arena, int num_threads, Fixed* fixed) const {
    Fixed taken{};
    taken.threads = arena.take<Thread>(num_threads);
    taken.sink_partials = arena.take<double>(p_.wants_dsinks ? p_.batch * p_.heads_q : 0);
    taken.waves = arena.take<Wave<Isa>>(2);
    taken.jobs = arena.take<Job<Isa>>(2 * kMaxWaveJobs);
    const std::size_t alone = alone_bytes();
    const std::int64_t block_kv = largest_block_kv();
    for (int t = 0; t < num_threads; ++t) {
      const KeyBlockBuffers<Isa> buffers = take_buffers(arena, plan_, block_kv);
      auto* memory = arena.take<std::byte>(static_cast<std::int64_t>(alone));
      if (fixed != nullptr) {
        taken.threads[t] = {buffers, memory};
      }
    }
    if (fixed != nullptr) {
      *fixed = taken;
    }
  }

  // The packs of `num_heads` heads.
  [[nodiscard]] std::size_t job_bytes(std::int64_t seqlen_q, std::int64_t num_heads) const {
    Arena arena;
    Job<Isa> job;
    job.group_end = num_heads;
    job.blocks = blocks_of<Isa>(seqlen_q, 1);
    take_heads(arena, plan_, job);
    return arena.used_bytes();
  }

  // dk and dv of one kv head in f32, for a group that is computed in parts.
  void take_group_sums(Arena& arena, float** dk, float** dv) const {
    const std::int64_t rows = round_up(p_.max_seqlen_kv, kRowMultiple<Isa>);
    *dk = arena.take<float>(rows * plan_.columns_qk);
    *dv = arena.take<float>(rows * plan_.columns_v);
  }
  [[nodiscard]] std::size_t group_sums_bytes() const {
    Arena arena;
    float* unused = nullptr;
    take_group_sums(arena, &unused, &unused);
    return arena.used_bytes();
  }

  // Block sizes grow with the length, up to the sequence itself where that is shorter.
  [[nodiscard]] std::int64_t largest_block_kv() const {
    return p_.max_seqlen_kv > 0 ? blocks_of<Isa>(1, p_.max_seqlen_kv).block_kv : 0;
  }

  // How many jobs of the largest kind a wave wants.
  [[nodiscard]] std::int64_t wave_jobs(int num_threads) const {
    const std::int64_t blocks = blocks_of<Isa>(p_.max_seqlen_q, p_.max_seqlen_kv).num_kv;
    std::int64_t jobs = ceil_div(kTasksPerThread * num_threads, blocks > 0 ? blocks : 1);
    jobs = jobs < num_threads ? num_threads : jobs;
    jobs = jobs > kMaxWaveJobs ? kMaxWaveJobs : jobs;
    const auto job = static_cast<std::int64_t>(job_bytes(p_.max_seqlen_q, p_.group()));
    const std::int64_t fit = kWaveBytes / job > 1 ? kWaveBytes / job : 1;
    jobs = jobs < fit ? jobs : fit;
    return jobs < num_jobs_ ? jobs : num_jobs_;
  }

  [[nodiscard]] std::int64_t alone_rows() const {
    const std::int64_t rows = kAloneRows / p_.group();
    return rows > kWidth<Isa> ? rows : kWidth<Isa>;
  }

  [[nodiscard]] bool runs_alone(const Band& band) const {
    return band.seqlen_q <= alone_rows() &&
           blocks_of<Isa>(band.seqlen_q, band.seqlen_kv).num_kv == 1 &&
           band.seqlen_q * band.seqlen_kv * p_.group() * (p_.head_dim + p_.head_dim_v) <=
               2 * kAloneWork;
  }

  // Where even the longest job runs alone, there is nothing for more threads than jobs; to wake one
  // in vain costs more than such a job.
  [[nodiscard]] int useful_threads() const {
    if (!runs_alone(Band{p_.max_seqlen_q, p_.max_seqlen_kv, 0, 0}) || num_jobs_ >= p_.num_threads) {
      return p_.num_threads;
    }
    return num_jobs_ > 1 ? static_cast<int>(num_jobs_) : 1;
  }

  // Room for the largest job that may run alone; none if every sequence is too long.
  [[nodiscard]] std::size_t alone_bytes() const {
    const bool varies = p_.packed || p_.has_seqused_q || p_.has_seqused_kv;
    if (!varies && !runs_alone(Band{p_.seqlen_q, p_.seqlen_kv, 0, 0})) {
      return 0;
    }
    return job_bytes(p_.max_seqlen_q < alone_rows() ? p_.max_seqlen_q : alone_rows(), p_.group());
  }

  // Rows that belong to no sequence.
  void zero_unused(int thread, int num_threads) const {
    const auto zero = [&](const Tensor& t, std::int64_t batch_index, Range rows, std::int64_t heads,
                          std::int64_t n) {
      const std::int64_t share = ceil_div(rows.size(), num_threads);
      const std::int64_t begin = rows.begin + thread * share;
      const std::int64_t end = begin + share < rows.end ? begin + share : rows.end;
      for (std::int64_t h = 0; h < heads; ++h) {
        zero_rows(t, batch_index, begin, end, h, n);
      }
    };
    if (p_.wants_dq) {
      for_each_unused_q(p_, args_, [&](std::int64_t b, Range rows) {
        zero(args_.dq, b, rows, p_.heads_q, p_.head_dim);
      });
    }
    if (p_.wants_dk || p_.wants_dv) {
      for_each_unused_kv(p_, args_, [&](std::int64_t b, Range rows) {
        if (p_.wants_dk) {
          zero(args_.dk, b, rows, p_.heads_kv, p_.head_dim);
        }
        if (p_.wants_dv) {
          zero(args_.dv, b, rows, p_.heads_kv, p_.head_dim_v);
        }
      });
    }
  }

  void start(std::int64_t index, Job<Isa>& job) const {
    job.batch = index / p_.heads_kv;
    job.kv_head = index % p_.heads_kv;
    job.group_end = p_.group();
    job.sequence = sequence(p_, args_, job.batch);
    job.blocks = blocks_of<Isa>(job.sequence.band.seqlen_q, job.sequence.band.seqlen_kv);
  }

  static bool sees_nothing(const Band& band) { return band.kv_range(0, band.seqlen_q).empty(); }

  // All jobs that see nothing or are small, in runs, so that taking one costs little.
  void run_alone(const Thread& thread, int num_threads) {
    std::int64_t run = num_jobs_ / (std::int64_t{8} * num_threads);
    run = run < 1 ? 1 : run > 32 ? 32 : run;
    for (std::int64_t begin;
         (begin = next_alone_.fetch_add(run, std::memory_order_relaxed)) < num_jobs_;) {
      const std::int64_t end = begin + run < num_jobs_ ? begin + run : num_jobs_;
      for (std::int64_t index = begin; index < end; ++index) {
        Job<Isa> job;
        start(index, job);
        if (sees_nothing(job.sequence.band)) {
          write_nothing(job);
        } else if (runs_alone(job.sequence.band)) {
          Arena arena(thread.alone);
          take_heads(arena, plan_, job);
          for (std::int64_t task = 0; task < job.num_packs(); ++task) {
            pack(job, task, thread);
          }
          key_block(job, 0, thread);
        }
      }
    }
  }

  void write_nothing(const Job<Isa>& job) {
    const Sequence& seq = job.sequence;
    if (p_.wants_dk) {
      zero_rows(args_.dk, seq.batch_index, seq.kv_begin, seq.kv_begin + seq.band.seqlen_kv,
                job.kv_head, p_.head_dim);
    }
    if (p_.wants_dv) {
      zero_rows(args_.dv, seq.batch_index, seq.kv_begin, seq.kv_begin + seq.band.seqlen_kv,
                job.kv_head, p_.head_dim_v);
    }
    for (std::int64_t g = 0; g < p_.group(); ++g) {
      const std::int64_t head = job.kv_head * p_.group() + g;
      if (p_.wants_dq) {
        zero_rows(args_.dq, seq.batch_index, seq.q_begin, seq.q_begin + seq.band.seqlen_q, head,
                  p_.head_dim);
      }
      if (p_.wants_dsinks) {
        sink_partials_[job.batch * p_.heads_q + head] =
            sink_gradient(p_, args_, seq, head, nullptr);
      }
    }
  }

  void pack(const Job<Isa>& job, std::int64_t task, const Thread& thread) const {
    const std::int64_t g = task / job.blocks.num_q;
    pack_query_block<Isa>(plan_, args_, job, job.heads[g],
                          job.kv_head * p_.group() + job.group_begin + g, task % job.blocks.num_q,
                          thread.buffers.staging);
  }

  void key_block(const Job<Isa>& job, std::int64_t kv_block, const Thread& thread) {
    KeyBlockTask<Isa>(plan_, args_, job, thread.buffers, kv_block).run();
    if (p_.wants_dsinks && kv_block == 0) {
      for (std::int64_t g = job.group_begin; g < job.group_end; ++g) {
        const std::int64_t head = job.kv_head * p_.group() + g;
        sink_partials_[job.batch * p_.heads_q + head] =
            sink_gradient(p_, args_, job.sequence, head, job.heads[g - job.group_begin].neg_delta);
      }
    }
  }

  // Cuts what is left of the workspace into two waves if two of the wanted size fit, else one; if
  // that does not hold the largest job, some of it becomes the sums of a group in parts.
  void setup_waves(const Fixed& fixed, Arena& arena) {
    const std::size_t whole = job_bytes(p_.max_seqlen_q, p_.group());
    const std::size_t wanted = static_cast<std::size_t>(wave_jobs(p_.num_threads)) * whole;
    if (num_jobs_ > 0 && args_.workspace_bytes - arena.used_bytes() < whole) {
      take_group_sums(arena, &group_dk_, &group_dv_);
    }
    auto* memory = arena.take<std::byte>(0);
    const std::size_t left = args_.workspace_bytes - arena.used_bytes();
    num_waves_ = num_jobs_ > 0 && left >= 2 * wanted ? 2 : 1;
    const std::size_t bytes = num_waves_ == 2 ? wanted : left;
    waves_ = fixed.waves;
    for (int w = 0; w < 2; ++w) {
      auto* wave = new (&waves_[w]) Wave<Isa>{};
      wave->claimed.store(w - num_waves_, std::memory_order_relaxed);
      wave->ready.store(-1, std::memory_order_relaxed);
      wave->left.store(-1, std::memory_order_relaxed);
      wave->memory = memory + static_cast<std::size_t>(w) * bytes;
      wave->bytes = bytes;
      wave->jobs = fixed.jobs + w * kMaxWaveJobs;
    }
  }

  void run_waves(const Thread& thread, int num_threads) {
    for (std::int64_t number = 0;; ++number) {
      Wave<Isa>& wave = waves_[number % num_waves_];
      std::int64_t previous = number - num_waves_;
      if (wave.claimed.load(std::memory_order_relaxed) == previous &&
          wave.claimed.compare_exchange_strong(previous, number, std::memory_order_relaxed)) {
        if (number >= num_waves_) {
          spin_until([&] { return wave.left.load(std::memory_order_acquire) == num_threads; });
        }
        fill(wave, number, num_threads);
        wave.ready.store(number, std::memory_order_release);
      } else {
        spin_until([&] { return wave.ready.load(std::memory_order_acquire) == number; });
      }
      if (wave.num_jobs == 0) {
        return;
      }
      share_tasks(wave, thread);
      wave.left.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  void share_tasks(Wave<Isa>& wave, const Thread& thread) {
    std::int64_t job = 0;
    std::int64_t task = 0;
    while (wave.next_pack(job, task)) {
      pack(wave.jobs[job], task, thread);
      wave.packs_done.fetch_add(1, std::memory_order_release);
    }
    spin_until([&] { return wave.packs_done.load(std::memory_order_acquire) == wave.num_packs; });
    while (wave.next_key_block(job, task)) {
      key_block(wave.jobs[job], task, thread);
    }
  }

  // Takes the next jobs that neither see nothing nor run alone. A job too large for a wave of its
  // own comes in parts of its group, one per wave. Waves are filled one after the other, so
  // next_wave_job_ and next_wave_group_ need no lock.
  void fill(Wave<Isa>& wave, std::int64_t number, int num_threads) {
    wave.num_jobs = 0;
    wave.num_packs = 0;
    std::int64_t num_blocks = 0;
    std::size_t used = 0;
    while (next_wave_job_ < num_jobs_ && wave.num_jobs < kMaxWaveJobs) {
      if (wave.num_jobs >= num_threads && num_blocks >= kTasksPerThread * num_threads) {
        break;
      }
      Job<Isa> job;
      start(next_wave_job_, job);
      const Band& band = job.sequence.band;
      if (sees_nothing(band) || runs_alone(band)) {
        ++next_wave_job_;
        continue;
      }
      job.group_begin = next_wave_group_;
      while (job.group_end - job.group_begin > 1 &&
             used + job_bytes(band.seqlen_q, job.group_end - job.group_begin) > wave.bytes) {
        --job.group_end;
      }
      const std::size_t bytes = job_bytes(band.seqlen_q, job.group_end - job.group_begin);
      const bool in_parts = job.group_begin > 0 || job.group_end < p_.group();
      if (wave.num_jobs > 0 && (in_parts || used + bytes > wave.bytes)) {
        break;
      }
      if (in_parts) {
        // The sums are one kv head's, and the part before must be done.
        if (number > 0) {
          const Wave<Isa>& before = waves_[(number - 1) % num_waves_];
          spin_until([&] { return before.left.load(std::memory_order_acquire) == num_threads; });
        }
        job.dk = group_dk_;
        job.dv = group_dv_;
      }
      Arena arena(wave.memory + used);
      take_heads(arena, plan_, job);
      used += bytes;
      num_blocks += job.blocks.num_kv;
      wave.num_packs += job.num_packs();
      wave.jobs[wave.num_jobs++] = job;
      if (job.group_end < p_.group()) {
        next_wave_group_ = job.group_end;
        break;
      }
      next_wave_group_ = 0;
      ++next_wave_job_;
    }
    wave.start(num_blocks);
  }

  // The batch's partial sums, in order.
  void finish_sinks() const {
    if (!p_.wants_dsinks) {
      return;
    }
    auto* dsinks = static_cast<float*>(args_.dsinks);
    for (std::int64_t h = 0; h < p_.heads_q; ++h) {
      double sum = 0;
      for (std::int64_t b = 0; b < p_.batch; ++b) {
        sum += sink_partials_[b * p_.heads_q + h];
      }
      dsinks[h] = static_cast<float>(sum);
    }
  }

  const Problem& p_;
  const Args& args_;
  const BackwardPlan<Isa> plan_;
  const std::int64_t num_jobs_;
  Thread* threads_ = nullptr;
  double* sink_partials_ = nullptr;
  Wave<Isa>* waves_ = nullptr;
  std::int64_t num_waves_ = 1;
  std::int64_t next_wave_job_ = 0;
  std::int64_t next_wave_group_ = 0;
  float* group_dk_ = nullptr;  // (max_seqlen_kv, columns_qk); null: every job fits whole
  float* group_dv_ = nullptr;  // (max_seqlen_kv, columns_v)
  alignas(Arena::kAlignment) std::atomic<std::int64_t> next_alone_{0};
};

template <class Isa>
static WorkspaceSize backward_workspace(const Problem& p) {
  return Backward<Isa>::workspace_size(p);
}

template <class Isa>
static void backward(const Problem& p, const Args& args) {
  Backward<Isa>(p, args).run();
}

}  // namespace flashgrad::cpu
