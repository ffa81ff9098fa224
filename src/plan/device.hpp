// SPDX-License-Identifier: Apache-2.0
// GPUs as data: what a streaming multiprocessor (SM) does per clock and what it holds. The figures
// are in devices/*.json, each with its source, and are compiled into the program.
#pragma once

#include <string>
#include <vector>

namespace flashgrad::plan {

// Rates are per SM and clock. NaN: nobody has measured it; 0: the device has none.
struct Device {
  std::string name;
  std::string what;
  double sm_count = 0;
  double clock_mhz = 0;
  double mma_flop_per_clk = 0;  // 16-bit inputs, f32 sums; a multiply-add is 2
  double exp_per_clk = 0;
  double fp32_per_clk = 0;
  double shared_bytes_per_clk = 0;
  double dsmem_bytes_per_clk = 0;  // from another SM's shared memory into this one's
  double l2_load_bytes_per_clk = 0;
  double l2_reduce_bytes_per_clk = 0;  // f32 additions to global memory
  double registers = 0;                // 32-bit, of an SM
  double max_registers_per_thread = 0;
  double shared_bytes = 0;           // the most that one thread block may have
  double tensor_memory_columns = 0;  // of 128 lanes x 32 bits
  double l2_bytes = 0;
  double hbm_bytes = 0;
  double hbm_bytes_per_s = 0;
  double power_w = 0;
  std::vector<std::string> sources;  // one for each of kDeviceFields

  [[nodiscard]] double hbm_bytes_per_clk() const {  // and SM
    return hbm_bytes_per_s / (sm_count * clock_mhz * 1e6);
  }
  [[nodiscard]] double mma_flop_per_s() const {
    return sm_count * clock_mhz * 1e6 * mma_flop_per_clk;
  }
};

struct DeviceField {
  const char* key;
  double Device::*value;
  bool may_be_missing = false;
  // Beyond any machine, and times stay finite.
  double least = 1e-3;
  double most = 1e18;
};

inline constexpr DeviceField kDeviceFields[] = {
    {"sm_count", &Device::sm_count, false, 1, 1 << 16},
    {"clock_mhz", &Device::clock_mhz},
    {"mma_flop_per_clk", &Device::mma_flop_per_clk},
    {"exp_per_clk", &Device::exp_per_clk},
    {"fp32_per_clk", &Device::fp32_per_clk},
    {"shared_bytes_per_clk", &Device::shared_bytes_per_clk},
    {"dsmem_bytes_per_clk", &Device::dsmem_bytes_per_clk, true},
    {"l2_load_bytes_per_clk", &Device::l2_load_bytes_per_clk, true},
    {"l2_reduce_bytes_per_clk", &Device::l2_reduce_bytes_per_clk, true},
    {"registers", &Device::registers},
    {"max_registers_per_thread", &Device::max_registers_per_thread},
    {"shared_bytes", &Device::shared_bytes},
    {"tensor_memory_columns", &Device::tensor_memory_columns, true},
    {"l2_bytes", &Device::l2_bytes},
    {"hbm_bytes", &Device::hbm_bytes},
    {"hbm_bytes_per_s", &Device::hbm_bytes_per_s},
    {"power_w", &Device::power_w},
};

// From the text of a devices/*.json; throws std::invalid_argument that names the figure which is
// missing, unknown, out of range or without a source.
Device parse_device(const std::string& json);

// The devices that are compiled in, oldest first.
const std::vector<Device>& devices();

// Throws std::invalid_argument that lists the names.
const Device& find_device(const std::string& name);

// The processor this program runs on. What it does per second is measured by the caller.
struct Cpu {
  std::string instruction_set;  // of the cpu backend; empty: none
  int threads = 0;
  double l1_bytes = 0;  // data caches; 0 where the system does not tell
  double l2_bytes = 0;
  double l3_bytes = 0;
  double memory_bytes = 0;
};

Cpu this_cpu();

}  // namespace flashgrad::plan
