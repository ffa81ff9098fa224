// SPDX-License-Identifier: Apache-2.0
// Files that appear whole or not at all.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace flashgrad::tool {

// Refuses an output that is the input itself, by whatever path, or a link to it.
void refuse_same_file(const std::string& input, const std::string& output);

// Refuses a path that `write_whole_file` could not write: before the work, not after it.
void check_writable(const std::string& path);

// Writes the parts one after the other to a temporary file beside `path`, which then takes its
// name. On an Error the path is as it was.
void write_whole_file(const std::string& path, std::span<const std::span<const std::byte>> parts);

}  // namespace flashgrad::tool
