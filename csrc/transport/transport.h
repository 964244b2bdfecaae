#pragma once

// The interfaces of a transport. A Context moves opaque frames and bulk buffers
// between itself and other Contexts of the same kind. A transport knows neither
// torch nor what is in a frame.
//
// The asynchronous contract, for every transport:
//  - a callback fires exactly once, also on error and on close;
//  - callbacks and Handler methods run without any lock of the transport held,
//    except introduction(), onAccept(), onConnected() and onFrameAhead(), which
//    must be quick. They run on a thread that polls the Poller, on the
//    TaskRunner, on a thread of the transport's own, or on the thread that
//    called into the transport, and may run concurrently;
//  - bulk memory that is passed to send() or receive() belongs to the transport
//    until the callback has fired;
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

// Why something ends, or does not begin, when its Context stops.
inline base::Error transportEnded() {
  return {base::ErrorKind::kShutDown, "the transport has ended"};
}

// Runs `then` once the first `bytes` of a bulk buffer are written, or with the
// error that keeps them from being written. The bytes are written in order, and
// not by the transport. `then` runs at once, or later on a thread of the
// writer, which it must not keep busy.
using WhenFilled = std::function<void(uint64_t bytes, Callback then)>;

// A bulk buffer to be sent.
struct BulkSpan : base::ConstSpan {
  // Null, or the shared memory that the buffer lies in, for a connection whose
  // distance() is kSharesMemory. The receiver may then keep the memory, and
  // write to it, instead of copying it. So this process does not look at the
  // memory again while it is lent, and after an error the transport discards
  // it. The pointer is held until the callback fires, and may own more than the
  // map.
  std::shared_ptr<memory::SharedMap> map = nullptr;
  // Other receivers are sent this memory, too: each of them maps it as its own
  // (copy on write), and none sends it back.
  bool isCommon = false;
  // Null: all bytes of the buffer are there. Otherwise they are still being
  // written, for a connection whose distance() is kApart. When that fails, the
  // callback of send() gets the error, and so does the receiver.
  WhenFilled whenFilled = nullptr;
};

// How far it is from one end of a connection to the other.
enum class Distance : uint8_t {
  kUnknown, // the connection is not open
  kSameProcess, // both ends are in this process
  kSharesMemory, // the peer can map shared memory of this process
  kApart, // bulk leaves in pieces: later ones may still be written meanwhile
};

// The path that a Connection uses, as text for people: info(), logs, metrics.
struct PathInfo {
  std::string state; // of the peer: "connecting", "open", ...
  std::string control; // e.g. "shared memory (posix)", "tcp (eth0)"
  std::string bulk; // e.g. "shared memory, else cma", "lanes: tcp (eth0)"
  std::string why; // why no faster path is used; empty if there is none
};

// A frame whose head has arrived, and whose bulk is to be received. If the
// Incoming is destroyed without receive() or refuse(), the sender's callback
// gets kRefused.
// Thread: any, but only one thread at a time.
class Incoming {
 public:
  virtual ~Incoming() = default;

  virtual base::ConstSpan head() const = 0;
  virtual const std::vector<uint64_t>& bulkSizes() const = 0;

  // How many bytes of the bulk need memory of this process. Bulk that is likely
  // to have a map() does not count.
  virtual uint64_t bytesToCopy() const {
    uint64_t bytes = 0;
    for (const uint64_t size : bulkSizes()) {
      bytes += size;
    }
    return bytes;
  }

  // Refuses the bulk; the sender's callback gets `why`.
  virtual void refuse(const base::Error& why) = 0;

  // The memory of bulk buffer `index` itself, to be used in place; null if the
  // buffer has to be copied. Memory that isForeign() may be sent back over the
  // same connection (BulkSpan::map); the sender also gets it back when the last
  // reference dies, on any thread. To be called before receive().
  virtual std::shared_ptr<memory::SharedMap> map(size_t /*index*/) {
    return nullptr;
  }

  // Is called with a part of `into` whose bytes have arrived before the rest.
  using Arrived = std::function<void(base::MutableSpan part)>;

  // Moves the bulk into `into`, which has the count and the sizes of
  // bulkSizes(), with null data for buffers that are mapped. To be called at
  // most once. The callback may fire before the call returns. If the transport
  // brings bulk in parts, it calls `arrived`, which may be null, for some of
  // the parts, maybe even after the callback.
  virtual void receive(
      std::vector<base::MutableSpan> into,
      Callback callback,
      Arrived arrived) = 0;

  // What Handler::onFrameAhead() returned for this frame; null if that was not
  // called.
  std::shared_ptr<void> ahead;
};

// One path to one peer Context. Thread: any.
class Connection {
 public:
  virtual ~Connection() = default;

  // Sends `head`, which the transport owns from now on, with `bulk`, which it
  // borrows until the callback fires. Never blocks. Frames that are sent before
  // the connection is open are kept until it is.
  virtual void
  send(base::Buffer head, std::vector<BulkSpan> bulk, Callback callback) = 0;

  // Ends the connection; idempotent. Frames that were sent while the connection
  // was open still leave. Frames that wait for the connection to open fail, and
  // so does bulk that the peer has not taken. The peer sees kShutDown.
  virtual void close() = 0;

  // Ends the connection as if it had broken: the group takes the peer for dead,
  // another worker has taken over the peer's name, or the peer has sent what
  // this worker cannot read.
  virtual void lose(const base::Error& /*why*/) {
    close();
  }

  // Asks the peer whether the peer still has this connection, which may have
  // ended at the peer alone. If it has ended there, it ends here, too.
  virtual void probe() {}

  // What is known of the other end. A connection that is over does not open
  // again: its user has to make a new one.
  virtual PeerState peer() const = 0;

  bool closed() const {
    return isOver(peer());
  }

  virtual Distance distance() const {
    return Distance::kUnknown;
  }

  virtual PathInfo path() const = 0;
};

using ConnectionPtr = std::shared_ptr<Connection>;

// The owner's side of a Context.
class Handler {
 public:
  virtual ~Handler() = default;

  // The text that a peer gets as the answer to the `hello` with which it
  // connects.
  virtual std::string introduction() = 0;

  // A peer has connected, has proved that it may, and says `hello`. If this
  // returns an error, the peer is refused and will see the text.
  virtual base::Error onAccept(
      const ConnectionPtr& connection,
      const std::string& hello) = 0;

  // The peer has accepted our connect() and has answered with `hello`. If this
  // returns an error, the connection ends.
  virtual base::Error onConnected(
      const ConnectionPtr& connection,
      const std::string& hello) = 0;

  virtual void onFrame(
      const ConnectionPtr& connection,
      std::unique_ptr<Incoming> incoming) = 0;

  // A frame has arrived whose head is so large that the head has to be fetched.
  // Frames that arrive later may come to onFrame() before this one. What the
  // Handler returns comes to onFrame() with this frame, as Incoming::ahead, or
  // dies when the fetch fails. Called in the order in which frames arrive.
  virtual std::shared_ptr<void> onFrameAhead(const ConnectionPtr&) {
    return nullptr;
  }

  // The last call about a connection. The error is kShutDown when either end
  // called close().
  virtual void onClosed(
      const ConnectionPtr& connection,
      const base::Error& error) = 0;
};

// Owns everything that belongs to one local address. Thread: any.
class Context {
 public:
  virtual ~Context() = default;

  // The bytes that other workers pass to connect(): opaque, valid until stop().
  virtual std::string address() const = 0;

  // Sets the secret that peers must know to connect, and that this worker must
  // know to be let in. To be called before the first connection.
  virtual void setSecret(const std::string& /*secret*/) {}

  // Begins to deliver to `handler`. All three arguments outlive stop().
  virtual void
  start(base::Poller& poller, base::TaskRunner& runner, Handler& handler) = 0;

  // Returns at once; a failure is reported through onClosed().
  virtual ConnectionPtr connect(
      const std::string& address,
      const std::string& hello) = 0;

  // Gives back memory that has not been used for `age`. Returns whether there
  // is more memory that may become unused later.
  virtual bool trim(std::chrono::steady_clock::duration /*age*/) {
    return false;
  }

  // Closes all connections, waits a bounded time for frames that were sent to
  // leave, and fires all callbacks. No Handler method runs after stop()
  // returns: stop() waits for the threads that are inside of a Handler method
  // or of a callback, and lets no other thread in. So the caller must hold no
  // lock that these threads wait for. If the caller itself is inside of a
  // Handler method or of a callback (but not of introduction(), onAccept(),
  // onConnected() or onFrameAhead()), stop() does not wait for this method or
  // callback, and returns at once if another thread is already stopping the
  // context. Idempotent.
  virtual void stop() = 0;
};

} // namespace torch_rpc_ext::transport
