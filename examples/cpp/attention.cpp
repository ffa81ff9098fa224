// SPDX-License-Identifier: Apache-2.0
// A step of attention inside a training loop from C++: a packed batch of sequences of different
// lengths, a sliding window, one workspace for all calls, and what to do with an error.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <flashgrad/flashgrad.hpp>
#include <random>
#include <vector>

int main() {
  constexpr std::int64_t kHeads = 4;
  constexpr std::int64_t kHeadDim = 64;
  // Three sequences, the second one empty, one after the other without padding.
  std::vector<std::int32_t> offsets = {0, 200, 200, 500};
  const std::int64_t total = offsets.back();

  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  const auto random = [&](std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& x : values) {
      x = normal(rng);
    }
    return values;
  };
  const std::int64_t count = total * kHeads * kHeadDim;
  std::vector<float> q = random(count);
  std::vector<float> k = random(count);
  std::vector<float> v = random(count);
  std::vector<float> dout = random(count);
  std::vector<float> out(q.size());
  std::vector<float> dq(q.size());
  std::vector<float> dk(q.size());
  std::vector<float> dv(q.size());
  std::vector<float> lse(static_cast<std::size_t>(total * kHeads));

  const auto rows = [&](std::vector<float>& data) {
    return flashgrad::TensorView(data.data(), {total, kHeads, kHeadDim});
  };
  const flashgrad::TensorView q_view = rows(q);
  const flashgrad::TensorView k_view = rows(k);
  const flashgrad::TensorView v_view = rows(v);
  const flashgrad::TensorView out_view = rows(out);
  const flashgrad::TensorView dout_view = rows(dout);
  const flashgrad::TensorView dq_view = rows(dq);
  const flashgrad::TensorView dk_view = rows(dk);
  const flashgrad::TensorView dv_view = rows(dv);
  const flashgrad::TensorView lse_view(lse.data(), {kHeads, total});
  const flashgrad::TensorView offsets_view(offsets.data(), {4});

  flashgrad::Tensors tensors;
  tensors.q = q_view;
  tensors.k = k_view;
  tensors.v = v_view;
  tensors.out = out_view;
  tensors.lse = lse_view;
  tensors.cu_seqlens_q = offsets_view;
  tensors.cu_seqlens_kv = offsets_view;
  const flashgrad::Options options = flashgrad::Options{}.window(63, 0);

  try {
    flashgrad::Workspace workspace;  // kept over all steps, grows to the largest call
    flashgrad::forward(tensors, options, workspace);
    tensors.dout = dout_view;
    tensors.dq = dq_view;
    tensors.dk = dk_view;
    tensors.dv = dv_view;
    const flashgrad::WorkspaceBytes bytes =
        flashgrad::workspace_bytes(FG_BACKWARD, tensors, options);
    std::printf("backward: %zu bytes of workspace, %zu at least\n", bytes.preferred, bytes.minimum);
    flashgrad::backward(tensors, options, workspace);
  } catch (const flashgrad::Error& error) {
    std::fprintf(stderr, "flashgrad: %s (status %d)\n", error.what(), error.code());
    return 1;
  }

  // Adding x to all of v adds x to out, so the sums of dv and of dout over the rows agree.
  double sum_dv = 0;
  double sum_dout = 0;
  for (std::size_t i = 0; i < dv.size(); i += kHeadDim) {
    sum_dv += static_cast<double>(dv[i]);
    sum_dout += static_cast<double>(dout[i]);
  }
  std::printf("sum of dv %.6f, of dout %.6f\n", sum_dv, sum_dout);
  const bool right = std::abs(sum_dv - sum_dout) < 1e-3;

  // A wrong call throws, and says what was given and what is wanted.
  offsets.back() = static_cast<std::int32_t>(total) + 1;
  bool refused = false;
  try {
    flashgrad::forward(tensors, options);
  } catch (const flashgrad::Error& error) {
    refused = error.code() == FG_INVALID_ARGUMENT;
    std::printf("refused: %s\n", error.what());
  }
  return right && refused ? 0 : 1;
}
