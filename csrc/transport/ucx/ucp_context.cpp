#include "transport/ucx/ucp_context.h"

#include "base/interfaces.h"
#include "base/log.h"
#include "transport/ucx/status.h"
#include "transport/ucx/unfinished_endpoints.h"

#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

namespace {

// The space in /dev/shm that a process with hundreds of peers may need.
constexpr uint64_t kPosixSharedMemoryBytes = 64u << 20;

// Sets a value of UCX's configuration, unless the user has set the UCX_*
// variable of that name. A value that the user has given to us as an option
// (`explicitly`) wins over the variable.
void set(
    ucp_config_t* config,
    const char* key,
    const std::string& value,
    bool explicitly = false) {
  if (!explicitly &&
      std::getenv((std::string("UCX_") + key).c_str()) != nullptr) {
    return;
  }
  const ucs_status_t status = ucp_config_modify(config, key, value.c_str());
  if (status != UCS_OK) {
    base::log(
        base::LogLevel::kInfo,
        std::string("UCX does not know the setting ") + key + "=" + value +
            ": " + ucs_status_string(status));
  }
}

// UCX has one list for IP interfaces and RDMA devices. Listing the wanted
// interfaces would exclude all RDMA devices, so the unwanted interfaces are
// excluded by name instead.
std::string excludedInterfaces(const std::vector<std::string>& wanted) {
  std::string text;
  for (const auto& [name, interface] : base::networkInterfaces()) {
    if (std::find(wanted.begin(), wanted.end(), name) == wanted.end()) {
      text += (text.empty() ? "^" : ",") + name;
    }
  }
  return text;
}

// By default UCX sets up two kinds of shared memory, POSIX and SysV, and each
// costs memory. SysV shared memory is only needed if /dev/shm, which is often
// small in a container, has no room.
bool hasPosixSharedMemory() {
  struct statvfs info{};
  return statvfs("/dev/shm", &info) == 0 && access("/dev/shm", W_OK) == 0 &&
      info.f_bavail * info.f_frsize >= kPosixSharedMemoryBytes;
}

std::string transportList(const Options& options) {
  // We read by CMA ourselves (bulk/cma.cpp says why); CUDA memory never reaches
  // UCX.
  std::string list = "^cma,cuda_copy,cuda_ipc,gdr_copy";
  if (!options.useSharedMemory) {
    list += ",shm";
  } else if (hasPosixSharedMemory()) {
    list += ",sysv";
  } else if (access("/dev/shm", F_OK) == 0 && access("/dev/shm", W_OK) != 0) {
    list += ",posix"; // read-only: UCX would not start
  }
  return list;
}

void configure(ucp_config_t* config, const Options& options) {
  set(config, "TLS", transportList(options));
  // With UCX's put over TCP, anyone who reaches the port can write to this
  // process's memory. Bulk between hosts is as fast without put (1.05 and 1.20
  // GB/s with, 1.12 and 1.10 without, by turns), and takes 20 % less CPU time.
  set(config, "TCP_PUT_ENABLE", "n");
  // Without this setting, UCX connects in a blocking system call while the
  // worker is locked: then calls to all other peers wait for a host that does
  // not answer. And each such attempt that fails leaves its socket open.
  set(config, "TCP_CONN_NB", "y");
  // The most bytes of bulk between hosts that one system call moves. With UCX's
  // default of 64 KiB, both sides sleep and wake for each piece: 300 ms for 200
  // MB there and back between two namespaces, against 236 ms with 512 KiB, at a
  // fifth of the context switches. 256 KiB and 1 MiB were slower.
  set(config, "TCP_RX_SEG_SIZE", "512k");
  // How many receive buffers of 8 KiB UCX allocates at once. UCX's default is
  // 512, which takes 4 MB before the first message.
  set(config, "POSIX_RX_BUFS_GROW", "64");
  if (!options.interfaces.empty()) {
    const std::string excluded = excludedInterfaces(options.interfaces);
    if (!excluded.empty()) {
      set(config, "NET_DEVICES", excluded, options.interfacesExplicit);
    }
  }
  // Without this setting, endpoints that notice errors do not use shared
  // memory, and UCX does not say so.
  set(config, "MM_ERROR_HANDLING", "y");
  set(config,
      "KEEPALIVE_INTERVAL",
      std::to_string(
          std::max(1, static_cast<int>(options.keepaliveSeconds * 500))) +
          "ms");
  // The kernels at both ends answer TCP's probes. So a process that is stopped
  // keeps its connections, and a host that is gone loses them after
  // `keepaliveSeconds` without an answer: by the user timeout if data is under
  // way, else by the probes, which count in whole seconds.
  const int seconds = std::max(2, static_cast<int>(options.keepaliveSeconds));
  const int idle = seconds / 2;
  set(config,
      "TCP_USER_TIMEOUT",
      std::to_string(static_cast<int>(options.keepaliveSeconds * 1000)) + "ms");
  set(config, "TCP_KEEPIDLE", std::to_string(idle) + "s");
  set(config, "TCP_KEEPINTVL", std::to_string(seconds - idle) + "s");
  set(config, "TCP_KEEPCNT", "1");
  if (options.ports.first != 0) {
    set(config,
        "TCP_PORT_RANGE",
        std::to_string(options.ports.first) + "-" +
            std::to_string(options.ports.second),
        /*explicitly=*/true);
  }
  set(config, "TCP_AF_PRIO", options.preferIpv6 ? "inet6,inet" : "inet,inet6");
  set(config, "MAX_RNDV_RAILS", "4"); // use up to 4 NICs at once
  set(config, "WARN_UNUSED_ENV_VARS", "n");
}

} // namespace

base::Result<std::shared_ptr<UcpContext>> UcpContext::create(
    const Options& options) {
  captureUcxLog();
  guardUnfinishedEndpoints();
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) {
    return toError(status, "reading UCX's configuration");
  }
  configure(config, options);

  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME |
      UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
  params.name = "torch_rpc_ext";
  params.mt_workers_shared = 1; // control and bulk workers share the context
  ucp_context_h context = nullptr;
  status = ucp_init(&params, config, &context);
  ucp_config_release(config);
  if (status != UCS_OK) {
    return toError(status, "opening UCX (ucp_init)");
  }
  return std::shared_ptr<UcpContext>(new UcpContext(context));
}

UcpContext::~UcpContext() {
  if (!kept_) {
    ucp_cleanup(context_);
  }
}

} // namespace torch_rpc_ext::transport::ucx
