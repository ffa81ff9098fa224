// SPDX-License-Identifier: Apache-2.0
// A whole training loop in C++ without a framework: one layer of causal attention learns to repeat
// the token before, which it can do only by looking one place back. flashgrad computes attention
// and its gradients; the projections, the loss and Adam are plain loops.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <flashgrad/flashgrad.hpp>
#include <random>
#include <vector>

namespace {

constexpr int kBatch = 8, kSeqlen = 32, kHeads = 2, kHeadDim = 16, kTokens = 16, kSteps = 150;
constexpr int kRows = kBatch * kSeqlen;
constexpr int kDim = kHeads * kHeadDim;

using Matrix = std::vector<float>;  // row-major

struct Parameter {
  Matrix value, gradient, mean, square;  // the last two are Adam's

  Parameter(int rows, int columns, std::mt19937& random)
      : value(static_cast<std::size_t>(rows * columns)),
        gradient(value.size()),
        mean(value.size()),
        square(value.size()) {
    std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(kDim)));
    for (float& x : value) {
      x = normal(random);
    }
  }

  void adam(int step) {
    const auto correction = [step](float decay) {
      return 1 - std::pow(decay, static_cast<float>(step));
    };
    for (std::size_t i = 0; i < value.size(); ++i) {
      mean[i] = 0.9F * mean[i] + 0.1F * gradient[i];
      square[i] = 0.99F * square[i] + 0.01F * gradient[i] * gradient[i];
      value[i] -=
          0.01F * (mean[i] / correction(0.9F)) / (std::sqrt(square[i] / correction(0.99F)) + 1e-8F);
      gradient[i] = 0;
    }
  }
};

// y (kRows, columns) = x (kRows, depth) w (depth, columns)
void linear(const Matrix& x, const Parameter& w, int depth, int columns, Matrix& y) {
  for (int i = 0; i < kRows; ++i) {
    for (int c = 0; c < columns; ++c) {
      float sum = 0;
      for (int k = 0; k < depth; ++k) {
        sum += x[i * depth + k] * w.value[k * columns + c];
      }
      y[i * columns + c] = sum;
    }
  }
}

// dw += x^T dy and dx += dy w^T, of y = x w.
void linear_backward(const Matrix& x, const Matrix& dy, int depth, int columns, Parameter& w,
                     Matrix& dx) {
  for (int i = 0; i < kRows; ++i) {
    for (int k = 0; k < depth; ++k) {
      for (int c = 0; c < columns; ++c) {
        w.gradient[k * columns + c] += x[i * depth + k] * dy[i * columns + c];
        dx[i * depth + k] += dy[i * columns + c] * w.value[k * columns + c];
      }
    }
  }
}

// The mean of -log p(target); dlogits gets its gradient.
float cross_entropy(const Matrix& logits, const std::vector<int>& targets, Matrix& dlogits) {
  float loss = 0;
  for (int i = 0; i < kRows; ++i) {
    const float* row = &logits[i * kTokens];
    float sum = 0;
    for (int c = 0; c < kTokens; ++c) {
      sum += std::exp(row[c]);
    }
    loss += (std::log(sum) - row[targets[i]]) / kRows;
    for (int c = 0; c < kTokens; ++c) {
      dlogits[i * kTokens + c] = (std::exp(row[c]) / sum - (c == targets[i] ? 1.0F : 0.0F)) / kRows;
    }
  }
  return loss;
}

float train() {
  std::mt19937 random(1);
  Parameter embedding(kTokens, kDim, random), position(kSeqlen, kDim, random);
  Parameter wq(kDim, kDim, random), wk(kDim, kDim, random), wv(kDim, kDim, random);
  Parameter wo(kDim, kTokens, random);
  Matrix h(kRows * kDim), q(h), k(h), v(h), out(h), lse(kBatch * kHeads * kSeqlen);
  Matrix dh(h), dq(h), dk(h), dv(h), dout(h), logits(kRows * kTokens), dlogits(logits);

  // Made once: the tensors keep their places from step to step, and so does the workspace.
  const auto view = [](Matrix& m) {
    return flashgrad::TensorView(m.data(), {kBatch, kSeqlen, kHeads, kHeadDim});
  };
  const auto q_view = view(q), k_view = view(k), v_view = view(v), out_view = view(out);
  const auto dq_view = view(dq), dk_view = view(dk), dv_view = view(dv), dout_view = view(dout);
  const flashgrad::TensorView lse_view(lse.data(), {kBatch, kHeads, kSeqlen});
  flashgrad::Tensors tensors;
  tensors.q = q_view;
  tensors.k = k_view;
  tensors.v = v_view;
  tensors.out = out_view;
  tensors.lse = lse_view;
  tensors.dout = dout_view;
  tensors.dq = dq_view;
  tensors.dk = dk_view;
  tensors.dv = dv_view;
  const flashgrad::Options options = flashgrad::Options().causal();
  flashgrad::Workspace workspace;

  std::vector<int> tokens(kRows), targets(kRows);
  float loss = 0;
  for (int step = 1; step <= kSteps; ++step) {
    for (int i = 0; i < kRows; ++i) {
      tokens[i] = static_cast<int>(random() % kTokens);
      targets[i] = i % kSeqlen == 0 ? tokens[i] : tokens[i - 1];
      for (int c = 0; c < kDim; ++c) {
        h[i * kDim + c] =
            embedding.value[tokens[i] * kDim + c] + position.value[i % kSeqlen * kDim + c];
      }
    }
    linear(h, wq, kDim, kDim, q);
    linear(h, wk, kDim, kDim, k);
    linear(h, wv, kDim, kDim, v);
    flashgrad::forward(tensors, options, workspace);  // writes out and lse
    linear(out, wo, kDim, kTokens, logits);
    loss = cross_entropy(logits, targets, dlogits);

    dout.assign(dout.size(), 0);
    dh.assign(dh.size(), 0);
    linear_backward(out, dlogits, kDim, kTokens, wo, dout);
    flashgrad::backward(tensors, options, workspace);  // writes dq, dk and dv
    linear_backward(h, dq, kDim, kDim, wq, dh);
    linear_backward(h, dk, kDim, kDim, wk, dh);
    linear_backward(h, dv, kDim, kDim, wv, dh);
    for (int i = 0; i < kRows; ++i) {
      for (int c = 0; c < kDim; ++c) {
        embedding.gradient[tokens[i] * kDim + c] += dh[i * kDim + c];
        position.gradient[i % kSeqlen * kDim + c] += dh[i * kDim + c];
      }
    }
    for (Parameter* parameter : {&embedding, &position, &wq, &wk, &wv, &wo}) {
      parameter->adam(step);
    }
    if (step == 1 || step % 25 == 0) {
      std::printf("step %3d  loss %.4f\n", step, static_cast<double>(loss));
    }
  }
  return loss;
}

}  // namespace

int main() {
  try {
    // Guessing costs log(16) = 2.8; without attention's gradients it stays near that.
    return train() < 0.3F ? 0 : 1;
  } catch (const flashgrad::Error& error) {
    std::fprintf(stderr, "flashgrad: %s\n", error.what());
    return 1;
  }
}
