// A server of gRPC on google.golang.org/grpc whose messages are plain bytes.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// plain is a codec of messages that are bytes already.
type plain struct{}

func (plain) Name() string { return "proto" }

func (plain) Marshal(message any) ([]byte, error) { return *message.(*[]byte), nil }

func (plain) Unmarshal(bytes []byte, message any) error {
	*message.(*[]byte) = append([]byte{}, bytes...)
	return nil
}

var cancelled, waiting atomic.Int64

func own(ctx context.Context) string {
	received, _ := metadata.FromIncomingContext(ctx)
	return strings.Join(received.Get("x-own"), ",")
}

func call(stream grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(stream)
	ctx := stream.Context()
	var request []byte
	name := method[strings.LastIndex(method, "/")+1:]
	if name != "Total" && name != "Chat" {
		if err := stream.RecvMsg(&request); err != nil {
			return err
		}
	}
	send := func(answer []byte) error { return stream.SendMsg(&answer) }
	switch name {
	case "Echo":
		stream.SetHeader(metadata.Pairs("x-began", own(ctx)))
		stream.SetTrailer(metadata.Pairs("x-ended", own(ctx), "x-raw-bin", "\x00\xff"))
		return send(request)
	case "Fail":
		code, message, _ := strings.Cut(string(request), ":")
		var parsed codes.Code
		parsed.UnmarshalJSON([]byte(`"` + code + `"`))
		return status.Error(parsed, message)
	case "Many":
		var number, size int
		fmt.Sscan(string(request), &number, &size)
		for at := range number {
			if err := send([]byte(strings.Repeat(string([]byte{byte(at % 251)}), size))); err != nil {
				return err
			}
		}
		return nil
	case "Total", "Chat":
		total := 0
		for {
			err := stream.RecvMsg(&request)
			if err == io.EOF && name == "Total" {
				return send([]byte(fmt.Sprint(total)))
			} else if err == io.EOF {
				return nil
			} else if err != nil {
				return err
			}
			total += len(request)
			if name == "Chat" {
				if err := send(append([]byte("heard "), request...)); err != nil {
					return err
				}
			}
		}
	case "Wait":
		waiting.Add(1)
		<-ctx.Done()
		waiting.Add(-1)
		cancelled.Add(1)
		return ctx.Err()
	case "Tick":
		for {
			if err := send([]byte("tick")); err != nil {
				return err
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(100 * time.Millisecond):
			}
		}
	case "Cancellations":
		return send([]byte(fmt.Sprint(cancelled.Load(), waiting.Load())))
	}
	return status.Error(codes.Unimplemented, "there is no "+method)
}

func main() {
	encoding.RegisterCodec(plain{})
	listener, err := net.Listen("tcp", "0.0.0.0:"+os.Getenv("PORT"))
	if err != nil {
		log.Fatal(err)
	}
	handler := func(_ any, stream grpc.ServerStream) error { return call(stream) }
	server := grpc.NewServer(grpc.UnknownServiceHandler(handler), grpc.MaxRecvMsgSize(16<<20))
	log.Fatal(server.Serve(listener))
}
