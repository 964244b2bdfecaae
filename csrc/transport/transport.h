#pragma once

// The face of a transport: a Context moves opaque frames and bulk buffers
// between itself and other Contexts of the same kind. It knows no torch, no
// wire format and no keys.
//
// The asynchronous contract, for every transport:
//  - a callback fires exactly once, also on error and on close;
//  - callbacks and Handler methods run without any lock of the transport held
//    (except onAccept() and onConnected(), which must be quick), on a thread
//    that polls the Poller, on the TaskRunner, or on the thread that called
//    into the transport; they may run concurrently;
//  - bulk memory that is passed to send() or receive() belongs to the
//    transport until the callback has fired;
//  - the first error wins; after onClosed() a Connection delivers nothing.

#include "base/buffer.h"
#include "base/error.h"
#include "base/poller.h"
#include "base/task.h"
#include "memory/shared_map.h"
#include "transport/peer_state.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torch_rpc_ext::transport {

using Callback = std::function<void(const base::Error&)>;

// Bulk that is still being written when it is handed to send(): in order, and
// not by the transport.
// Thread: any.
class Filling {
 public:
  virtual ~Filling() = default;

  // Runs `then` once the first `bytes` of it are there, or with the error that
  // keeps them from it: at once, or later on a thread that must not be kept.
  virtual void whenFilled(uint64_t bytes, Callback then) = 0;
};

// A bulk buffer to be sent. One with a region the receiver may keep, and write
// to, instead of copying it: the sender will not look at it again before it has
// it back.
struct BulkSpan : base::ConstSpan {
  memory::SharedRegion region = {};
  // Keeps the region: the receiver may give it back (`returned`), and then it
  // is used here on. It is discarded when a child of the receiver's has it too.
  std::shared_ptr<memory::SharedMap> owner = nullptr;
  // The region is one of the receiver's own, which it has sent over this
  // connection.
  bool returned = false;
  // Null: all of it is there. Else its byte i is once the first
  // `fillingOffset` + i + 1 of the filling are. Only for a connection that
  // sendsPieces(). The callback of send() gets the error of a filling that
  // fails, and so does the receiver.
  std::shared_ptr<Filling> filling = nullptr;
  uint64_t fillingOffset = 0;
};

class Connection;

// Memory of the sender's that is used here.
struct Adopted {
  // Null: there is none, it has to be copied.
  std::shared_ptr<memory::SharedMap> memory;
  // What it can be returned by (BulkSpan::returned), and over which connection.
  // 0: it is this process's own again.
  uint64_t region = 0;
  std::weak_ptr<Connection> home = {};
};

// What a Connection is made of, for people: info(), logs, metrics.
struct PathInfo {
  std::string state; // of the peer: "connecting", "open", ...
  std::string control; // e.g. "shared memory (posix)", "tcp (eth0)"
  std::string bulk; // e.g. "shared memory, else cma", "ucx: tcp (eth0)"
  std::string why; // why not something faster; empty when nothing is
};

// A frame whose head has arrived and whose bulk has not. Destroying it without
// receive() refuses the bulk: the sender's callback gets kRefused.
// Thread: any, one at a time.
class Incoming {
 public:
  virtual ~Incoming() = default;

  virtual base::ConstSpan head() const = 0;
  virtual const std::vector<uint64_t>& bulkSizes() const = 0;

  // Those of their bytes that take memory here: not of what adopt() is likely
  // to find.
  virtual uint64_t bytesToCopy() const {
    uint64_t bytes = 0;
    for (const uint64_t size : bulkSizes()) {
      bytes += size;
    }
    return bytes;
  }

  // Does not take the bulk; the sender's callback gets kRefused with the text.
  virtual void refuse(const base::Error& why) = 0;

  // The memory of bulk buffer `index` itself, when the sender gives it away and
  // this process can have it. The sender has it back when the last reference
  // dies, on any thread. Before receive().
  virtual Adopted adopt(size_t /*index*/) {
    return {};
  }

  // A part of `into` that is there before the rest is.
  using Arrived = std::function<void(base::MutableSpan part)>;

  // Moves the bulk into `into` (same count and sizes as bulkSizes(), null data
  // for what was adopted). At most once. The callback may fire before the call
  // returns. `arrived`, which may be null, hears of parts where the transport
  // brings bulk in parts: not of all, and maybe still after the callback.
  virtual void receive(
      std::vector<base::MutableSpan> into,
      Callback callback,
      Arrived arrived) = 0;
};

// One path to one peer Context. Thread: any.
class Connection {
 public:
  virtual ~Connection() = default;

  // Sends `head` (owned) with `bulk` (borrowed until the callback fires; after
  // an error the peer may still use what has a region). Never blocks. Frames
  // sent before the connection is open are kept until it is.
  virtual void
  send(base::Buffer head, std::vector<BulkSpan> bulk, Callback callback) = 0;

  // Ends the connection after what was sent has left; idempotent. The peer
  // sees kShutDown.
  virtual void close() = 0;

  // Ends the connection as one that broke: the group takes the peer for dead,
  // or another has its name.
  virtual void lose(const base::Error& /*why*/) {
    close();
  }

  // What is known of the other end. Who holds a connection that is over has to
  // connect anew.
  virtual PeerState peer() const = 0;

  bool closed() const {
    return isOver(peer());
  }

  // The peer can map shared memory of this process (BulkSpan::region).
  virtual bool sharesMemory() const {
    return false;
  }

  // Bulk leaves piece by piece, and may be filled meanwhile
  // (BulkSpan::filling).
  virtual bool sendsPieces() const {
    return false;
  }

  // Both ends are in this process.
  virtual bool loopsBack() const {
    return false;
  }

  virtual PathInfo path() const = 0;
};

using ConnectionPtr = std::shared_ptr<Connection>;

// The owner's side of a Context.
class Handler {
 public:
  virtual ~Handler() = default;

  // What a peer that connects gets as the answer to its `hello`.
  virtual std::string introduction() = 0;

  // A peer has connected, has proved that it may, and says `hello`. An error
  // refuses it; the peer will see the text.
  virtual base::Error onAccept(
      const ConnectionPtr& connection,
      const std::string& hello) = 0;

  // The peer accepted our connect() and answered with `hello`.
  virtual base::Error onConnected(
      const ConnectionPtr& connection,
      const std::string& hello) = 0;

  virtual void onFrame(
      const ConnectionPtr& connection,
      std::unique_ptr<Incoming> incoming) = 0;

  // The last word about a connection: kShutDown when the peer closed it.
  virtual void onClosed(
      const ConnectionPtr& connection,
      const base::Error& error) = 0;
};

// Owns everything that belongs to one local address. Thread: any.
class Context {
 public:
  virtual ~Context() = default;

  // What others pass to connect(): opaque bytes, valid until stop().
  virtual std::string address() const = 0;

  // What peers must know to connect, and this one to be let in. Before the
  // first connection.
  virtual void setSecret(const std::string& /*secret*/) {}

  // Begins to deliver to `handler`. Both outlive stop().
  virtual void
  start(base::Poller& poller, base::TaskRunner& runner, Handler& handler) = 0;

  // Returns at once; failure is reported through onClosed().
  virtual ConnectionPtr connect(
      const std::string& address,
      const std::string& hello) = 0;

  // Gives memory back that has not been used for `age`. Returns whether there
  // is more, that may be unused later.
  virtual bool trim(std::chrono::steady_clock::duration /*age*/) {
    return false;
  }

  // Closes all connections, waits a bounded time for what was sent to leave,
  // fires all callbacks. No Handler method runs after it returns: it waits for
  // the threads that are inside of one, or of a callback, and keeps others
  // out. So the caller must hold nothing that these wait for. Where the caller
  // is itself inside of a Handler method or of a callback (not of onAccept() or
  // onConnected()), stop() does not wait for that one, and returns at once if
  // another thread stops the context already. Idempotent.
  virtual void stop() = 0;
};

} // namespace torch_rpc_ext::transport
