#pragma once

#include <string>
#include <tuple>
#include <vector>

// Tells people which UCX is loaded and what UCX can use. This header has no UCX
// types.
namespace torch_rpc_ext::transport::ucx {

// Version of the UCX library that is loaded, e.g. "1.22.0".
std::string libraryVersion();

// Path of the libucp that is loaded.
std::string libraryPath();

// (transport, device, kind) of each device that UCX can use in this process.
std::vector<std::tuple<std::string, std::string, std::string>> transports();

} // namespace torch_rpc_ext::transport::ucx
