# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` puts where: libraries, headers, the CMake package and the pkg-config file.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flashgrad)

# Two sets, since only the static library makes its user find OpenMP.
install(TARGETS flashgrad EXPORT flashgradTargets)
install(TARGETS flashgrad_static EXPORT flashgradStaticTargets)
install(EXPORT flashgradTargets NAMESPACE flashgrad:: DESTINATION ${package_dir})
install(EXPORT flashgradStaticTargets NAMESPACE flashgrad:: DESTINATION ${package_dir})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/flashgrad DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/flashgradConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/flashgradConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/flashgradConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/flashgradConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/flashgradConfigVersion.cmake
  DESTINATION ${package_dir})

# Relative to where the file lies, so that a moved prefix still works.
file(RELATIVE_PATH pc_to_prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(${CMAKE_CURRENT_LIST_DIR}/flashgrad.pc.in ${CMAKE_CURRENT_BINARY_DIR}/flashgrad.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/flashgrad.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
