// SPDX-License-Identifier: Apache-2.0
// Files that appear whole or not at all: a temporary file in the same directory, then rename.
#include "whole_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <utility>

#include "text.hpp"

namespace flashgrad::tool {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void throw_cannot_write(const std::string& path, const std::string& reason) {
  throw Error(fmt::format("{}: can't write: {}", printable(path), reason));
}

// The file that takes the output: what `path` names, through symbolic links.
fs::path target_of(const std::string& path) {
  std::error_code error;
  if (path.empty()) {
    throw_cannot_write(path, "the path is empty");
  }
  fs::path target = path;
  const fs::file_status status = fs::status(target, error);
  if (status.type() == fs::file_type::none) {
    throw_cannot_write(path, error.message());  // a name that is too long, say
  }
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    throw_cannot_write(path, "it exists and is not a regular file");
  }
  if (fs::is_symlink(target, error)) {
    if (!fs::exists(status)) {
      throw_cannot_write(path, "it is a symbolic link to a file that does not exist");
    }
    target = fs::canonical(target, error);
    if (error) {
      throw_cannot_write(path, error.message());
    }
  }
  if (!target.has_filename()) {
    throw_cannot_write(path, "it names a directory");
  }
  return target;
}

volatile std::sig_atomic_t pending_signal = 0;  // NOLINT(*-avoid-non-const-global-variables)

// While this lives, a signal that asks the program to end is noted, and takes effect when this
// goes: after the temporary file's name is gone.
class DeferredSignals {
 public:
  DeferredSignals() {
    pending_signal = 0;
    struct sigaction note {};
    note.sa_handler = [](int signal) { pending_signal = signal; };
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      sigaction(kSignals[i], nullptr, &before_[i]);
      if (before_[i].sa_handler != SIG_IGN) {  // as nohup leaves it
        sigaction(kSignals[i], &note, nullptr);
      }
    }
  }
  ~DeferredSignals() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      sigaction(kSignals[i], &before_[i], nullptr);
    }
    if (pending_signal != 0) {
      std::raise(pending_signal);
    }
  }
  DeferredSignals(const DeferredSignals&) = delete;
  DeferredSignals& operator=(const DeferredSignals&) = delete;

 private:
  static constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> before_{};
};

// A new file beside the target. Unless it takes the target's name, it goes when this goes.
class TemporaryFile {
 public:
  TemporaryFile(const std::string& path, fs::path target)
      : path_(path),
        target_(std::move(target)),
        name_((target_.parent_path() / ".flashgrad-XXXXXX").string()) {
    fd_ = mkostemp(name_.data(), O_CLOEXEC);
    if (fd_ < 0) {
      throw_cannot_write(path_, std::strerror(errno));
    }
  }
  ~TemporaryFile() {
    if (fd_ >= 0) {
      close(fd_);
      unlink(name_.c_str());
    }
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      if (pending_signal != 0) {
        throw_cannot_write(path_, "interrupted");
      }
      const ssize_t written =
          ::write(fd_, bytes.data(), std::min(bytes.size(), std::size_t{1} << 24));
      if (written < 0 && errno == EINTR) {
        continue;
      }
      if (written < 0) {
        throw_cannot_write(path_, std::strerror(errno));
      }
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
  }

  // Gives the file the mode an ordinary new file would have (an existing one keeps its own), then
  // the target's name.
  void commit() {
    struct stat existing {};
    mode_t mode = 0;
    if (stat(target_.c_str(), &existing) == 0) {
      mode = existing.st_mode & 07777U;
    } else {
      const mode_t mask = umask(0);
      umask(mask);
      mode = 0666U & ~mask;
    }
    // A full disk may show only here.
    if (fchmod(fd_, mode) != 0 || fsync(fd_) != 0 || rename(name_.c_str(), target_.c_str()) != 0) {
      throw_cannot_write(path_, std::strerror(errno));
    }
    close(std::exchange(fd_, -1));
  }

 private:
  DeferredSignals signals_;  // first, so that it goes last
  const std::string& path_;
  fs::path target_;
  std::string name_;
  int fd_ = -1;
};

}  // namespace

void refuse_same_file(const std::string& input, const std::string& output) {
  std::error_code error;  // of a file that is not there: then they are not the same
  if (fs::equivalent(input, output, error)) {
    throw_cannot_write(output, "it is the input, whose tensors would be lost");
  }
}

void check_writable(const std::string& path) { TemporaryFile(path, target_of(path)); }

void write_whole_file(const std::string& path, std::span<const std::span<const std::byte>> parts) {
  TemporaryFile file(path, target_of(path));
  for (const std::span<const std::byte> part : parts) {
    file.write(part);
  }
  file.commit();
}

}  // namespace flashgrad::tool
