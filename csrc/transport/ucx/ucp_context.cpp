#include "transport/ucx/ucp_context.h"

#include "base/interfaces.h"
#include "base/log.h"
#include "transport/ucx/status.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

namespace {

// What a process may come to need there with hundreds of peers.
constexpr uint64_t kPosixSharedMemoryBytes = 64u << 20;

// A setting of ours holds only where the user has not said otherwise in UCX's
// own environment, unless it is what the user said to us.
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

// UCX names RDMA devices in the same list as IP interfaces. To choose among the
// latter without losing the former, the others are excluded by name.
std::string excludedInterfaces(const std::vector<std::string>& wanted) {
  std::string text;
  for (const auto& [name, interface] : base::networkInterfaces()) {
    if (std::find(wanted.begin(), wanted.end(), name) == wanted.end()) {
      text += (text.empty() ? "^" : ",") + name;
    }
  }
  return text;
}

// Two kinds of shared memory are tried where one would do, and each costs
// memory: SysV's is only needed where /dev/shm, often small in a container, has
// no room.
bool hasPosixSharedMemory() {
  struct statvfs info{};
  return statvfs("/dev/shm", &info) == 0 &&
      info.f_bavail * info.f_frsize >= kPosixSharedMemoryBytes;
}

std::string transportList(const Options& options) {
  // CMA is done by ourselves (cma.h says why); CUDA memory never reaches UCX.
  std::string list = "^cma,cuda_copy,cuda_ipc,gdr_copy";
  if (!options.useSharedMemory) {
    list += ",shm";
  } else if (hasPosixSharedMemory()) {
    list += ",sysv";
  }
  return list;
}

void configure(ucp_config_t* config, const Options& options) {
  set(config, "TLS", transportList(options));
  // UCX's put over TCP lets whoever reaches the port write to this process's
  // memory. Bulk between hosts is as fast without it (1.05 and 1.20 GB/s with,
  // 1.12 and 1.10 without, by turns), at 20 % less CPU time.
  set(config, "TCP_PUT_ENABLE", "n");
  // Else it connects in a blocking system call and keeps the worker locked:
  // calls to all others wait for a host that does not answer. And each attempt
  // that fails there leaves its socket behind.
  set(config, "TCP_CONN_NB", "y");
  // What one system call moves at most, of bulk between hosts. UCX's 64 KiB
  // make both sides sleep and wake at each: 300 ms for 200 MB there and back
  // between two namespaces, and 236 ms with this, at a fifth of the context
  // switches. 256 KiB and 1 MiB were slower.
  set(config, "TCP_RX_SEG_SIZE", "512k");
  // How many receive buffers of 8 KiB are made at once; UCX makes 512, 4 MB of
  // them, before the first message.
  set(config, "POSIX_RX_BUFS_GROW", "64");
  if (!options.interfaces.empty()) {
    const std::string excluded = excludedInterfaces(options.interfaces);
    if (!excluded.empty()) {
      set(config, "NET_DEVICES", excluded, options.interfacesExplicit);
    }
  }
  // Without it, endpoints that notice errors silently avoid shared memory.
  set(config, "MM_ERROR_HANDLING", "y");
  set(config,
      "KEEPALIVE_INTERVAL",
      std::to_string(
          std::max(1, static_cast<int>(options.keepaliveSeconds * 500))) +
          "ms");
  // The kernels at both ends answer, so a process that is stopped keeps its
  // connections and a host that is gone loses them: after `keepalive` without
  // an answer, whether data is under way (user timeout) or not (probes, in
  // whole seconds).
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
  set(config, "MAX_RNDV_RAILS", "4"); // as many NICs as there are, to a point
  set(config, "WARN_UNUSED_ENV_VARS", "n");
}

} // namespace

base::Result<std::shared_ptr<UcpContext>> UcpContext::create(
    const Options& options) {
  captureUcxLog();
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
  ucp_cleanup(context_);
}

} // namespace torch_rpc_ext::transport::ucx
