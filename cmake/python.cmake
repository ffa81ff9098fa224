# SPDX-License-Identifier: Apache-2.0
# What the wheel of pyproject.toml takes from the build: the libraries beside the package's Python files, without the links that
# a wheel can't hold, and the command line.
install(FILES $<TARGET_FILE:flashgrad> DESTINATION flashgrad RENAME libflashgrad.so COMPONENT python)
if(FLASHGRAD_JAX)
  install(FILES $<TARGET_FILE:flashgrad_xla> DESTINATION flashgrad COMPONENT python)
endif()
if(FLASHGRAD_BUILD_TOOLS)
  install(PROGRAMS $<TARGET_FILE:flashgrad_cli> DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT python)
endif()
