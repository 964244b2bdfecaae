// Writes the seed corpus: ordinary values, encoded. After a format has changed,
// run it by `python -m tests.fuzz seeds`.

#include "agent/device/ipc_wire.h"
#include "agent/hello.h"
#include "fuzz/targets/target.h"
#include "transport/ucx/handshake.h"
#include "transport/ucx/lanes/socket.h"
#include "transport/ucx/protocol.h"
#include "wire/call_frame.h"

#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport::ucx;
namespace lanes = torch_rpc_ext::transport::ucx::lanes;

namespace {

std::filesystem::path corpus;

void write(const char* target, const char* name, base::ConstSpan bytes) {
  const auto folder = corpus / target;
  std::filesystem::create_directories(folder);
  std::ofstream file(folder / name, std::ios::binary);
  file.write(static_cast<const char*>(bytes.data), bytes.size);
}

void write(const char* target, const char* name, const std::string& bytes) {
  write(target, name, fuzz::spanOf(bytes));
}

void writeHeaders() {
  const std::pair<FrameKind, const char*> kinds[] = {
      {FrameKind::kOpen, "open"},
      {FrameKind::kFrame, "frame"},
      {FrameKind::kAbort, "abort"}};
  for (const auto& [kind, name] : kinds) {
    FrameHeader header;
    header.kind = kind;
    header.count = 2;
    header.token = 0x1122334455667788;
    header.transfer = 3;
    header.acknowledged = kKept | 4;
    write("frame_header", name, {&header, sizeof(header)});
  }
}

void writePreambles() {
  Preamble preamble;
  preamble.challenge = std::string(kChallengeBytes, 'c');
  preamble.token = 42;
  preamble.process = {1, 2, 345, 0x7f0000001000, 6};
  preamble.sameHost = true;
  preamble.address = {std::string(48, 'a'), std::string(24, 'n')};
  preamble.hello = agent::encode(agent::Hello{"group", 3, "worker3"});
  write("preamble", "plain", fuzz::spanOf(encode(preamble)));
  preamble.keyShare = std::string(kKeyShareBytes, 'k');
  preamble.encryption = Encryption::kBetweenHosts;
  const base::Buffer bytes = encode(preamble);
  write("preamble", "encrypted", fuzz::spanOf(bytes));
  const std::string text(
      reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const std::string key = groupKey("secret");
  write(
      "signed",
      "preamble",
      fuzz::spanOf(withProof(text, proof(key, 1, {9, text, {}}))));
}

void writeBulk() {
  write(
      "pull_request",
      "request",
      fuzz::spanOf(encode(
          PullRequest{
              0, 3, 0x10000, ChannelKind::kLanes, std::string(40, 'b')})));
  const BulkEntry entries[] = {
      {1 << 20, 0x7f0000000000, 0, 0}, {3 << 20, 0, 77, 12}};
  std::string table("\2\0\0\0", 4);
  table.append(reinterpret_cast<const char*>(entries), sizeof(entries));
  write("bulk_entries", "table", table);
  write("bulk_entries", "table_and_head", table + "head");
}

void writeSmallOnes() {
  write(
      "address",
      "address",
      encodeAddress(
          {42,
           {1, 2, 345, 0x7f0000001000, 6},
           {std::string(48, 'a'), std::string(24, 'n')}}));
  write(
      "lane_address",
      "two",
      lanes::encode(
          {{{"10.0.0.1", 42000}, {"fd00::1", 9}}, std::string(16, 'k')}));
  write("hello", "hello", agent::encode(agent::Hello{"group", 3, "worker3"}));
  write(
      "hello",
      "come_back",
      agent::encode(agent::Hello{"group", 3, "worker3", 7}));
  write("hello", "no_group", agent::encode(agent::Hello{"", -1, "w"}));
  write("key_share", "key", std::string(32, '\11'));
  write("key_share", "zeros", std::string(32, '\0'));
}

void writeFrames() {
  using namespace wire;
  const std::string payload = "payload";
  const std::string bytes(64, 's');
  const StorageEntry storages[] = {
      {fuzz::spanOf(bytes), false}, {{nullptr, 1 << 20}, true}};
  using enum TensorLayout;
  const TensorRecord records[] = {
      {kStrided, 6, kRequiresGrad, 2, 0, 0},
      {kStrided, 6, 0, 1, 1, 16},
      {kSparseCoo, 0, kCoalesced, 2, 1, 0},
      {kStrided, 4, 0, 2, 0, 0},
      {kStrided, 6, 0, 1, 0, 8},
      {kSparseCsr, 0, 0, 2, 0, 0},
      {kStrided, 4, 0, 1, 0, 0},
      {kStrided, 4, 0, 1, 0, 0},
      {kStrided, 6, 0, 1, 0, 0},
      {kQuantized, 0, 0, 0, kPerTensor, 0},
      {kStrided, 13, 0, 2, 0, 0},
      {kStrided, 7, 0, 0, 0, 0},
      {kStrided, 4, 0, 0, 0, 0},
      {kUndefined, 0, 0, 0, 0, 0}};
  const Dim dims[] = {
      {2, 4},
      {4, 1},
      {100, 1},
      {8, 0},
      {8, 0},
      {2, 2},
      {2, 1},
      {2, 1},
      {2, 0},
      {2, 0},
      {3, 1},
      {2, 1},
      {2, 1},
      {4, 4},
      {4, 1}};
  CallFrame frame;
  frame.header = {CallKind::kRequest, 0, 0, 1};
  write("call_frame", "empty", fuzz::spanOf(encode(frame).value()));
  frame.header = {CallKind::kResponse, 0x102, 5, 0x1234567890};
  frame.payload = fuzz::spanOf(payload);
  write("call_frame", "payload", fuzz::spanOf(encode(frame).value()));
  frame.storages = storages;
  frame.records = records;
  frame.dims = dims;
  write("call_frame", "tensors", fuzz::spanOf(encode(frame).value()));
  frame.payloadBulk = true;
  write("call_frame", "bulk_payload", fuzz::spanOf(encode(frame).value()));
  const StorageEntry placed[] = {
      {fuzz::spanOf(bytes), false, false, 1},
      {{nullptr, 1 << 20}, true, false, 2},
      {{nullptr, 64}, false, true, 8}};
  const TensorRecord onDevices[] = {
      {kStrided, 6, 0, 1, 0, 0},
      {kStrided, 6, 0, 1, 1, 0},
      {kStrided, 6, 0, 1, 2, 0}};
  frame.storages = placed;
  frame.records = onDevices;
  const Dim sixteen[] = {{16, 1}, {16, 1}, {16, 1}};
  frame.dims = sixteen;
  frame.note = fuzz::spanOf(bytes);
  write("call_frame", "devices", fuzz::spanOf(encode(frame).value()));
  const StorageEntry narrowed[] = {
      {fuzz::spanOf(bytes), false, false, 0, WireDtype::kBfloat16},
      {{nullptr, 1 << 20}, true, false, 2, WireDtype::kFloat16},
      {{nullptr, 64}, false, true, 8, WireDtype::kBfloat16}};
  frame.storages = narrowed;
  frame.header.kind = CallKind::kRequest;
  frame.header.answer = WireDtype::kFloat16;
  frame.header.timeout = 60'000;
  write("call_frame", "narrowed", fuzz::spanOf(encode(frame).value()));
  const uint64_t sums[] = {1, 2, 3, 0};
  frame.sums = sums;
  write("call_frame", "checksums", fuzz::spanOf(encode(frame).value()));
}

cuda::MemoryExport memoryOf(uint64_t bytes) {
  cuda::MemoryExport memory;
  memory.handle.bytes.fill(std::byte{'h'});
  memory.base = 0x7f0000000000;
  memory.size = 2 << 20;
  memory.bufferId = 7;
  memory.offset = 512;
  memory.bytes = bytes;
  return memory;
}

// The first byte is the kind of message. A note comes with the sizes of its
// storages, in units of 8 bytes.
void writeIpc() {
  using namespace agent::device;
  IpcNote note;
  note.token = 42;
  note.runs.push_back({0, memoryOf(800), {1}});
  note.runs.push_back({1, memoryOf(8 + 8 + 16 + 24), {0, 2, 3}});
  note.runs.back().sum = memoryOf(8);
  const base::Buffer bytes = note.write();
  write(
      "ipc_messages",
      "note",
      std::string("\0\4\1\144\2\3", 6) +
          std::string(
              reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  IpcOffer offer;
  offer.identity = {1, 2, 3, 4, {{{}, false, true}, {{}, true, false}}};
  offer.trials.push_back({0, 0x1122334455667788, memoryOf(8)});
  const auto offered = offer.write();
  write(
      "ipc_messages",
      "offer",
      "\1" + std::string(offered.begin(), offered.end()));
  const auto verdict =
      IpcVerdict{{{0, IpcVerdict::Kind::kWorks, ""},
                  {1, IpcVerdict::Kind::kHindered, "another pid namespace"}}}
          .write();
  write(
      "ipc_messages",
      "verdict",
      "\2" + std::string(verdict.begin(), verdict.end()));
  const auto released = writeReleased(42);
  write(
      "ipc_messages",
      "released",
      "\3" + std::string(released.begin(), released.end()));
}

// Seeds of targets whose input is a script, and not a message.
void writeScripts() {
  write(
      "encode_frame",
      "one_tensor",
      std::string("\0\1\1\5\0\0\0\1\2\3\4\5\6\7\0\2pa", 18) +
          std::string("\1\0\20ssssssssssssssss", 19) +
          std::string("\1\1\6\0\1\0\0\20\10", 9));
  // The same with checksums, and as bfloat16.
  write(
      "encode_frame",
      "narrowed_and_checked",
      std::string("\54\1\1\5\0\0\0\1\2\3\4\5\6\7\0\2pa", 18) +
          std::string("\1\4\20ssssssssssssssss", 19) +
          std::string("\1\1\6\0\1\0\0\20\10", 9));
  // Two messages are sealed, then delivered in order, twice, changed, cut off,
  // or with another header.
  const std::string sealed("\0\3\1abc\0\2\1de", 11);
  write("secure_channel", "in_order", sealed + std::string("\1\0\1\1", 4));
  write("secure_channel", "reordered", sealed + std::string("\1\1\1\0", 4));
  write("secure_channel", "replayed", sealed + std::string("\1\0\1\0", 4));
  write(
      "secure_channel",
      "changed",
      sealed + std::string("\2\0\7\0\3\3\0\11\0\4\0\20\1\1\0", 15));
  // The peer jumps to number 4098: then the first message is too old, the
  // second is not.
  write(
      "secure_channel",
      "late",
      sealed + std::string("\6\2\20\40\3\0\4\0\0\0\0\0", 12) +
          std::string(24, '\1') + std::string("\1\0\1\1", 4));
  // The peer jumps ahead to the largest number.
  write(
      "secure_channel",
      "jump",
      sealed + std::string("\7\377\377\377\377\377\377\377\377\40", 10) +
          std::string("\3\0\4\0\0\0\0\0", 8) + std::string(24, '\1') +
          std::string("\1\0", 2));
}

} // namespace

int main(int count, char** arguments) {
  fuzz::require(count == 2, "one argument: the folder of the corpus");
  corpus = arguments[1];
  writeHeaders();
  writePreambles();
  writeBulk();
  writeSmallOnes();
  writeFrames();
  writeIpc();
  writeScripts();
  return 0;
}
