#include "transport/ucx/info.h"

#include "transport/ucx/status.h"

#include <dlfcn.h>
#include <ucp/api/ucp.h>
#include <uct/api/uct.h>

namespace torch_rpc_ext::transport::ucx {

std::string libraryVersion() {
  return ucp_get_version_string();
}

std::string libraryPath() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&ucp_init_version), &info) == 0) {
    return "unknown";
  }
  return info.dli_fname;
}

namespace {

const char* kindOf(uct_device_type_t type) {
  switch (type) {
    case UCT_DEVICE_TYPE_NET:
      return "network";
    case UCT_DEVICE_TYPE_SHM:
      return "intra-node";
    case UCT_DEVICE_TYPE_ACC:
      return "accelerator";
    case UCT_DEVICE_TYPE_SELF:
      return "loopback";
    default:
      return "unknown";
  }
}

using TransportList =
    std::vector<std::tuple<std::string, std::string, std::string>>;

void addTransports(
    uct_component_h component,
    const char* mdName,
    TransportList& list) {
  uct_md_config_t* config = nullptr;
  if (uct_md_config_read(component, nullptr, nullptr, &config) != UCS_OK) {
    return;
  }
  uct_md_h md = nullptr;
  const ucs_status_t status = uct_md_open(component, mdName, config, &md);
  uct_config_release(config);
  if (status != UCS_OK) {
    return;
  }
  uct_tl_resource_desc_t* resources = nullptr;
  unsigned count = 0;
  if (uct_md_query_tl_resources(md, &resources, &count) == UCS_OK) {
    for (unsigned i = 0; i < count; ++i) {
      list.emplace_back(
          resources[i].tl_name,
          resources[i].dev_name,
          kindOf(resources[i].dev_type));
    }
    uct_release_tl_resource_list(resources);
  }
  uct_md_close(md);
}

} // namespace

TransportList transports() {
  captureUcxLog();
  TransportList list;
  uct_component_h* components = nullptr;
  unsigned count = 0;
  if (uct_query_components(&components, &count) != UCS_OK) {
    return list;
  }
  for (unsigned i = 0; i < count; ++i) {
    uct_component_attr_t attr{};
    attr.field_mask = UCT_COMPONENT_ATTR_FIELD_MD_RESOURCE_COUNT;
    if (uct_component_query(components[i], &attr) != UCS_OK ||
        attr.md_resource_count == 0) {
      continue;
    }
    std::vector<uct_md_resource_desc_t> mds(attr.md_resource_count);
    attr.field_mask = UCT_COMPONENT_ATTR_FIELD_MD_RESOURCES;
    attr.md_resources = mds.data();
    if (uct_component_query(components[i], &attr) != UCS_OK) {
      continue;
    }
    for (const auto& md : mds) {
      addTransports(components[i], md.md_name, list);
    }
  }
  uct_release_component_list(components);
  return list;
}

} // namespace torch_rpc_ext::transport::ucx
